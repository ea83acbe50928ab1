"""The `/api` routes, health, metrics and the OpenAPI page over real HTTP."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.small_registry import BASE_NAME, POLICY, SmallServer, small_server

from apprentice.core.errors import ConfigError
from apprentice.core.records import Trajectory
from apprentice.core.server.app import bind
from apprentice.core.wire import CheckpointInfo, Health, ModelInfo, TrainJob

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallServer]:
    with small_server(tmp_path_factory.mktemp("control")) as running:
        yield running


def post(server: SmallServer, path: str, body: Any = None, headers: dict[str, str] | None = None) -> httpx.Response:
    return server.http.post(f"{server.url}{path}", json={} if body is None else body, headers=headers)


def get(server: SmallServer, path: str, **params: Any) -> httpx.Response:
    return server.http.get(f"{server.url}{path}", params=params)


def code(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def opened(server: SmallServer, id_: str, **more: Any) -> str:
    response = post(server, "/api/trajectories", {"id": id_, "policy": POLICY, **more})
    assert response.status_code == 201, response.text
    return id_


def test_registering_the_same_policy_again_changes_nothing_and_another_body_is_refused(server: SmallServer) -> None:
    body = {"project": "mail", "name": "second", "base_model": BASE_NAME}
    first, again = post(server, "/api/models", body), post(server, "/api/models", body)
    assert first.json() == again.json()
    assert ModelInfo.model_validate(first.json()).policy == "mail/second"
    assert code(post(server, "/api/models", {**body, "seed": 5})) == (409, "model_mismatch")
    assert get(server, "/api/models/mail/second").json() == first.json()
    assert POLICY in [info["policy"] for info in get(server, "/api/models").json()]
    assert code(get(server, "/api/models/mail/third")) == (404, "model_not_found")


def test_a_trajectory_lives_from_open_to_finished(server: SmallServer) -> None:
    id_ = opened(server, "life", group_id="g", scenario_id="s", metadata={"a": 1})
    post(server, f"/t/{id_}/v1/chat/completions", {"model": POLICY, "messages": HI})
    event = {"trajectory_id": id_, "name": "search", "arguments": {"q": 1}, "result": "found"}
    assert post(server, f"/api/trajectories/{id_}/tool-events", event).status_code == 204
    assert post(server, f"/api/trajectories/{id_}/reward", {"reward": 0.25, "metrics": {"steps": 2}}).status_code == 204
    assert post(server, f"/api/trajectories/{id_}/finish", {"reward": 0.5}).status_code == 204
    read = Trajectory.model_validate(get(server, f"/api/trajectories/{id_}").json())
    assert (read.status.value, read.reward, read.metrics, read.metadata) == ("finished", 0.5, {"steps": 2}, {"a": 1})
    assert read == server.ledger.trajectory(id_)
    assert len(read.completions) == len(read.tool_events) == 1
    short = get(server, f"/api/trajectories/{id_}", tokens="false").json()
    assert short["completions"] == []
    late = post(server, f"/api/trajectories/{id_}/reward", {"reward": 0.75})
    assert (late.status_code, server.ledger.trajectory(id_).reward) == (204, 0.75)


def test_an_end_is_final_but_may_be_repeated(server: SmallServer) -> None:
    id_ = opened(server, "ended")
    for _ in range(2):
        assert post(server, f"/api/trajectories/{id_}/fail", {"error": "the tool broke"}).status_code == 204
    assert code(post(server, f"/api/trajectories/{id_}/finish")) == (409, "trajectory_state")
    assert server.ledger.trajectory(id_).reward is None, "failed is not a zero reward"


def test_opening_twice_is_one_trajectory_and_another_body_is_a_conflict(server: SmallServer) -> None:
    opened(server, "twice", group_id="a")
    opened(server, "twice", group_id="a")
    assert code(post(server, "/api/trajectories", {"id": "twice", "policy": POLICY, "group_id": "b"})) == (409, "conflict")
    assert code(post(server, "/api/trajectories", {"policy": "mail/nobody"})) == (404, "model_not_found")
    assert code(post(server, "/api/trajectories", {"policy": BASE_NAME})) == (404, "model_not_found")
    unnamed = post(server, "/api/trajectories", {"policy": POLICY}).json()["id"]
    assert server.ledger.trajectory(unnamed).policy == POLICY


def test_trajectories_are_listed_in_pages(server: SmallServer) -> None:
    ids = [opened(server, f"page-{index}", group_id="pages") for index in range(5)]
    first = get(server, "/api/trajectories", group_id="pages", limit=3).json()
    second = get(server, "/api/trajectories", group_id="pages", limit=3, after=first[-1]["id"]).json()
    assert [item["id"] for item in first + second] == ids[::-1]
    assert get(server, "/api/trajectories", group_id="pages", status="finished").json() == []


@pytest.mark.parametrize("verb", ["reward", "finish", "fail", "tool-events"])
def test_what_is_said_about_an_unknown_trajectory_is_refused(server: SmallServer, verb: str) -> None:
    body = {"error": "x"} if verb == "fail" else {"trajectory_id": "nobody", "name": "f"} if verb == "tool-events" else {"reward": 1}
    assert code(post(server, f"/api/trajectories/nobody/{verb}", body)) == (404, "trajectory_not_found")
    assert code(get(server, "/api/trajectories/nobody")) == (404, "trajectory_not_found")


def test_a_tool_event_belongs_to_the_trajectory_of_its_path(server: SmallServer) -> None:
    refused = post(server, "/api/trajectories/one/tool-events", {"trajectory_id": "other", "name": "f"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "trajectory_id")


@pytest.mark.parametrize("raw", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", '"NaN"', "1" + "0" * 400, "true_", "null_"])
@pytest.mark.parametrize("field", ['{"reward": %s}', '{"metrics": {"m": %s}}', '{"completion_rewards": {"c": %s}}'])
def test_a_reward_is_a_finite_number(server: SmallServer, raw: str, field: str) -> None:
    id_ = opened(server, "finite")
    response = server.http.post(
        f"{server.url}/api/trajectories/{id_}/reward", content=(field % raw).encode(), headers={"content-type": "application/json"}
    )
    assert code(response) == (400, "invalid_request")
    assert server.ledger.trajectory(id_).reward is None


JOB = {"kind": "sft", "policy": POLICY, "demonstrations": [{"messages": [{"role": "user", "content": "a"}]}]}


def test_a_train_job_is_submitted_once_per_idempotency_key(server: SmallServer) -> None:
    key = {"idempotency-key": "k1"}
    first, again = post(server, "/api/train-jobs", JOB, key), post(server, "/api/train-jobs", JOB, key)
    assert (first.status_code, again.status_code) == (202, 202)
    assert first.json()["id"] == again.json()["id"]
    assert code(post(server, "/api/train-jobs", {**JOB, "policy": "mail/other"}, key)) == (409, "idempotency_conflict")
    assert post(server, "/api/train-jobs", JOB).json()["id"] != first.json()["id"]
    read = TrainJob.model_validate(get(server, f"/api/train-jobs/{first.json()['id']}").json())
    assert (read.state, read.result is not None) == ("no_update", True)
    assert read.id in [job["id"] for job in get(server, "/api/train-jobs").json()]
    assert code(get(server, "/api/train-jobs/nothing")) == (404, "job_not_found")
    assert code(get(server, "/api/train-jobs/nothing/events")) == (404, "job_not_found")


def test_events_are_replayed_from_where_the_reader_was(server: SmallServer) -> None:
    id_ = post(server, "/api/train-jobs", JOB).json()["id"]
    path = f"{server.url}/api/train-jobs/{id_}/events"
    everything = read_events(server.http.get(path))
    assert [(event["seq"], event["kind"]) for event in everything] == [(1, "phase"), (2, "end")]
    for response in (
        server.http.get(path, params={"after": 1}),
        server.http.get(path, headers={"last-event-id": "1"}),
    ):
        assert read_events(response) == everything[1:]
    refused = server.http.get(path, headers={"last-event-id": "x"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "last-event-id")


def read_events(response: httpx.Response) -> list[Any]:
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = [dict(line.split(": ", 1) for line in block.splitlines()) for block in response.text.split("\n\n") if block]
    events = [json.loads(block["data"]) for block in blocks]
    assert [block["id"] for block in blocks] == [str(event["seq"]) for event in events]
    return events


def test_checkpoints_are_listed_pinned_and_deleted(server: SmallServer) -> None:
    for step in (1, 2):
        server.ledger.put_checkpoint(CheckpointInfo(policy=POLICY, step=step, path=f"/somewhere/{step}", created_at=1.0))
    assert [info["step"] for info in get(server, "/api/checkpoints", policy=POLICY).json()] == [1, 2]
    path = f"/api/checkpoints/{POLICY}/1"
    assert post(server, f"{path}/pin", {"pinned": True}).json()["pinned"] is True
    assert get(server, path).json()["pinned"] is True
    assert code(server.http.delete(f"{server.url}{path}")) == (409, "conflict")
    post(server, f"{path}/pin", {"pinned": False})
    assert server.http.delete(f"{server.url}{path}").status_code == 204
    assert code(get(server, path)) == (404, "checkpoint_not_found")
    assert code(get(server, f"/api/checkpoints/{POLICY}/{10**30}")) == (400, "invalid_request")


def test_health_says_what_runs(server: SmallServer) -> None:
    health = Health.model_validate(get(server, "/health").json())
    assert (health.status, health.engine, health.queued, health.running) == ("ready", "scripted", 0, 0)
    assert POLICY in health.models


def test_metrics_count_requests_by_route_and_completions_by_policy(server: SmallServer) -> None:
    post(server, "/t/counted/v1/chat/completions", {"model": POLICY, "messages": HI})
    text = get(server, "/metrics").text
    assert 'apprentice_http_requests_total{method="POST",route="/t/{trajectory}/v1/chat/completions",status="200"}' in text
    assert f'apprentice_completions_total{{finish="stop",policy="{POLICY}"}}' in text
    assert "counted" not in text, "ids never become labels"


def test_metrics_name_a_request_by_the_route_as_it_is_called(server: SmallServer) -> None:
    routes = ["/health", "/v1/models", "/api/models/{project}/{name}", "/api/trajectories/{trajectory_id}/finish"]
    routes += ["/api/train-jobs/{job_id}", "/api/checkpoints/{project}/{name}/{step}"]
    paths = get(server, "/openapi.json").json()["paths"]
    for route in routes:
        (method,) = paths[route].keys() & {"get", "post"}
        path = route.format(project="a", name="b", trajectory_id="c", job_id="d", step=1)
        server.http.request(method, f"{server.url}{path}", json={} if method == "post" else None)
    named = set(re.findall(r'apprentice_http_requests_total{.*route="([^"]*)"', get(server, "/metrics").text))
    assert set(routes) <= named
    assert {route.replace(":path}", "}") for route in named} <= {*paths, "unknown"}


def test_every_reply_has_a_request_id_of_its_own(server: SmallServer) -> None:
    ids = {get(server, path).headers["x-request-id"] for path in ("/health", "/nothing", "/v1/models")}
    assert len(ids) == 3


def test_the_openapi_page_describes_every_error_that_a_route_can_give(server: SmallServer) -> None:
    page = get(server, "/openapi.json").json()
    assert "HTTPValidationError" not in page["components"]["schemas"], "no body has FastAPI's own form"
    for path, methods in page["paths"].items():
        for method, operation in methods.items():
            assert {"400", "401"} <= set(operation["responses"]), f"{method} {path}"
    chat = page["paths"]["/v1/chat/completions"]["post"]
    assert {"404", "409", "413", "429", "503", "504", "507"} <= set(chat["responses"])
    assert chat["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/ChatBody")
    assert chat["responses"]["200"]["content"]["application/json"]["schema"]["$ref"].endswith("/ChatCompletion")


def test_a_port_in_use_is_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            bind("127.0.0.1", port)
    for host, number in (("192.0.2.1", 0), ("127.0.0.1", 70000), ("no such host", 0)):
        with pytest.raises(ConfigError, match="cannot listen"):
            bind(host, number)
