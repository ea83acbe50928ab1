"""The `/v1` routes over real HTTP: real ledger, real codec, scripted engine."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.small_registry import BASE_NAME, CONTEXT, POLICY, SmallServer, eventually, holding, small_server
from support.tiny_models import tiny_tokenizer

from apprentice.core.records import BranchReason, FinishReason, TrajectoryStatus
from apprentice.core.server.limits import Limits

HI = [{"role": "user", "content": "hi"}]
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TEXT = "Hello, wörld ✓"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallServer]:
    with small_server(tmp_path_factory.mktemp("server"), TEXT) as running:
        yield running


def chat(server: SmallServer, path: str = "/v1", headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    whole = {"model": POLICY, "messages": HI, **body}
    return server.http.post(f"{server.url}{path}/chat/completions", json=whole, headers=headers)


def complete(server: SmallServer, **body: Any) -> httpx.Response:
    return server.http.post(f"{server.url}/v1/completions", json={"model": POLICY, **body})


def events_of(response: httpx.Response) -> list[Any]:
    """The data of each event; `[DONE]` as it is."""
    assert response.headers["content-type"].startswith("text/event-stream")
    data = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def choices_of(events: list[Any], index: int = 0) -> list[Any]:
    return [choice for event in events if event != "[DONE]" for choice in event["choices"] if choice["index"] == index]


def test_a_reply_says_who_sampled_it_and_the_ledger_holds_exactly_what_it_shows(server: SmallServer) -> None:
    response = chat(server, "/t/exact/v1", return_token_ids=True)
    body = response.json()
    choice = body["choices"][0]
    assert response.status_code == 200
    assert choice["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
    assert (choice["finish_reason"], body["policy_version"], body["model"]) == ("stop", 0, POLICY)
    assert response.headers["x-apprentice-policy-version"] == "0"
    assert response.headers["x-apprentice-completions"] == choice["provenance_id"]
    recorded = server.ledger.completion(choice["provenance_id"])
    assert list(recorded.prompt_ids) == body["prompt_token_ids"]
    assert list(recorded.token_ids) == choice["token_ids"]
    assert recorded.token_ids[-1] == server.tokenizer.eos_token_id
    assert (recorded.trajectory_id, recorded.policy, recorded.policy_version, recorded.call_id) == ("exact", POLICY, 0, body["id"])
    assert recorded.request.messages == ({"role": "user", "content": "hi"},)
    assert body["usage"] == {
        "prompt_tokens": len(recorded.prompt_ids),
        "completion_tokens": len(recorded.token_ids),
        "total_tokens": len(recorded.prompt_ids) + len(recorded.token_ids),
    }


def test_a_stream_adds_up_to_the_same_reply(server: SmallServer) -> None:
    events = events_of(chat(server, stream=True, stream_options={"include_usage": True}))
    choices = choices_of(events)
    assert "".join(choice["delta"].get("content", "") for choice in choices) == TEXT
    assert choices[0]["delta"]["role"] == "assistant"
    assert server.ledger.completion(choices[0]["provenance_id"]).message["content"] == TEXT
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"] == []
    assert events[-2]["usage"]["completion_tokens"] == len(server.ledger.completion(choices[0]["provenance_id"]).token_ids)
    assert all(event["policy_version"] == 0 for event in events[:-1])


def test_a_stream_shows_every_token_and_logprob_once(server: SmallServer) -> None:
    events = events_of(chat(server, stream=True, logprobs=True, top_logprobs=2, return_token_ids=True))
    choices = choices_of(events)
    recorded = server.ledger.completion(choices[0]["provenance_id"])
    shown = [token for choice in choices for token in choice.get("token_ids", ())]
    logprobs = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert shown == list(recorded.token_ids)
    assert [entry["logprob"] for entry in logprobs] == list(recorded.logprobs)
    assert all(len(entry["top_logprobs"]) == 2 for entry in logprobs)
    assert events[0]["prompt_token_ids"] == list(recorded.prompt_ids)


def test_logprob_bytes_spell_the_reply(server: SmallServer) -> None:
    content = chat(server, logprobs=True).json()["choices"][0]["logprobs"]["content"]
    spelled = b"".join(bytes(entry["bytes"]) for entry in content)
    assert spelled == TEXT.encode() + b"<|im_end|>"
    assert all(entry["top_logprobs"] == [] for entry in content)


def test_all_choices_are_stored_and_drawn_with_seeds_of_their_own(server: SmallServer) -> None:
    body = chat(server, "/t/many/v1", n=3, seed=7).json()
    recorded = server.ledger.completions("many")
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert {choice["provenance_id"] for choice in body["choices"]} == {completion.id for completion in recorded}
    assert sorted((completion.choice, completion.sampling.seed) for completion in recorded) == [(0, 7), (1, 8), (2, 9)]
    assert {completion.call_id for completion in recorded} == {body["id"]}


def test_a_streamed_call_with_several_choices_streams_each(server: SmallServer) -> None:
    events = events_of(chat(server, n=2, stream=True))
    for index in (0, 1):
        choices = choices_of(events, index)
        assert "".join(choice["delta"].get("content", "") for choice in choices) == TEXT
        assert "provenance_id" in choices[0]


def test_the_reply_ends_before_a_stop_string_but_its_tokens_are_kept(server: SmallServer) -> None:
    for stop in ("wör", ["never", "wör"]):
        choice = chat(server, stop=stop, return_token_ids=True).json()["choices"][0]
        assert choice["message"]["content"] == "Hello, "
        assert choice["finish_reason"] == "stop"
        assert server.tokenizer.decode(choice["token_ids"]) == "Hello, wör"
    streamed = choices_of(events_of(chat(server, stop="wör", stream=True)))
    assert "".join(choice["delta"].get("content", "") for choice in streamed) == "Hello, "


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_reply_is_cut_at_the_bound_that_was_asked_for(server: SmallServer, name: str) -> None:
    body = chat(server, **{name: 2}).json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 2


def test_sampling_parameters_reach_the_ledger(server: SmallServer) -> None:
    chat(server, "/t/params/v1", temperature=0.5, top_p=0.9, seed=3, max_tokens=50, stop=["x"])
    sampling = server.ledger.completions("params")[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.max_tokens, sampling.stop) == (0.5, 0.9, 3, 50, ("x",))


def test_without_a_bound_the_rest_of_the_context_is_used_up_to_the_default(server: SmallServer) -> None:
    chat(server, "/t/bound/v1")
    long = [{"role": "user", "content": "x" * 1500}]
    chat(server, "/t/bound/v1", messages=long)
    first, second = server.ledger.completions("bound")
    assert first.sampling.max_tokens == Limits().default_max_tokens
    assert second.sampling.max_tokens == CONTEXT - len(second.prompt_ids)


def test_token_id_prompts_are_sampled_from_exactly(server: SmallServer) -> None:
    body = complete(server, prompt=[5, 6, 7], return_token_ids=True, logprobs=2).json()
    choice = body["choices"][0]
    assert body["prompt_token_ids"] == [5, 6, 7]
    assert (choice["text"], choice["finish_reason"]) == (TEXT, "stop")
    assert "".join(choice["logprobs"]["tokens"][:5]) == "Hello"
    assert choice["logprobs"]["text_offset"][:3] == [0, 1, 2]
    assert server.ledger.completion(choice["provenance_id"]).prompt_ids == (5, 6, 7)


def test_text_prompts_are_encoded_as_they_are(server: SmallServer) -> None:
    body = complete(server, prompt="two plus two", return_token_ids=True).json()
    assert server.tokenizer.decode(body["prompt_token_ids"]) == "two plus two"


def test_completions_stream_too(server: SmallServer) -> None:
    response = complete(server, prompt="two", stream=True, stop=["wör"], n=2)
    for index in (0, 1):
        choices = choices_of(events_of(response), index)
        assert "".join(choice["text"] for choice in choices) == "Hello, "
        assert choices[-1]["finish_reason"] == "stop"


def test_a_tool_call_comes_back_as_one(tmp_path: Path) -> None:
    with small_server(tmp_path, CALL) as server:
        choice = chat(server, tools=[WEATHER]).json()["choices"][0]
        streamed = choices_of(events_of(chat(server, tools=[WEATHER], stream=True)))
        recorded = server.ledger.completion(streamed[0]["provenance_id"])
        without = chat(server, tools=[WEATHER], tool_choice="none").json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    function = choice["message"]["tool_calls"][0]["function"]
    assert (function["name"], json.loads(function["arguments"])) == ("weather", {"city": "Paris"})
    deltas = [call for choice in streamed for call in choice["delta"].get("tool_calls", ())]
    assert json.loads("".join(call["function"].get("arguments", "") for call in deltas)) == {"city": "Paris"}
    stored: Any = recorded.message["tool_calls"]
    assert stored[0]["id"] == deltas[0]["id"], "the id that was streamed is the id that is recorded"
    assert streamed[-1]["finish_reason"] == "tool_calls"
    assert without["finish_reason"] == "stop"
    assert "tool_calls" not in without["message"]


def test_a_call_that_does_not_parse_comes_back_as_text_with_the_reason(tmp_path: Path) -> None:
    broken = '<tool_call>\n{"name": "weather", "arguments": {]}\n</tool_call>'
    with small_server(tmp_path, broken) as server:
        choice = chat(server, tools=[WEATHER]).json()["choices"][0]
        streamed = choices_of(events_of(chat(server, tools=[WEATHER], stream=True)))
        recorded = server.ledger.completion(choice["provenance_id"])
    assert "arguments" in choice["message"]["content"]
    assert choice["finish_reason"] == "stop"
    assert choice["parse_error"] == recorded.parse_error is not None
    assert streamed[-1]["parse_error"] == choice["parse_error"]


def test_a_demanded_tool_that_is_not_called_is_reported(tmp_path: Path) -> None:
    with small_server(tmp_path, "No.") as server:
        choice = chat(server, tools=[WEATHER], tool_choice="required").json()["choices"][0]
    assert choice["parse_error"]


def test_two_calls_where_one_was_allowed_are_reported(tmp_path: Path) -> None:
    with small_server(tmp_path, f"{CALL}\n{CALL}") as server:
        allowed = chat(server, tools=[WEATHER]).json()["choices"][0]
        refused = chat(server, tools=[WEATHER], parallel_tool_calls=False).json()["choices"][0]
    assert len(allowed["message"]["tool_calls"]) == 2
    assert "parse_error" not in allowed
    assert "parallel_tool_calls" in refused["parse_error"]


@pytest.mark.parametrize(
    ("reply", "fits_object", "fits_schema"),
    [('{"a": 1}', True, True), ('{"a": "x"}', True, False), ("[1]", False, False), ("no", False, False), ('{"a": NaN}', False, False)],
)
def test_response_format_is_checked_after_sampling(tmp_path: Path, reply: str, fits_object: bool, fits_schema: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    with small_server(tmp_path, reply) as server:
        plain = chat(server, response_format={"type": "text"}).json()["choices"][0]
        object_ = chat(server, response_format={"type": "json_object"}).json()["choices"][0]
        schema_ = chat(server, response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}).json()["choices"][0]
        recorded = server.ledger.completion(schema_["provenance_id"])
    assert "parse_error" not in plain
    assert ("parse_error" not in object_) == fits_object
    assert ("parse_error" not in schema_) == fits_schema
    assert recorded.parse_error == schema_.get("parse_error")


def test_a_schema_that_refers_elsewhere_is_never_fetched(server: SmallServer) -> None:
    schema = {"$ref": f"{server.url}/health"}
    with_ref = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    before = server.http.get(f"{server.url}/metrics").text.count('route="/health"')
    assert chat(server, response_format=with_ref).status_code == 200
    assert server.http.get(f"{server.url}/metrics").text.count('route="/health"') == before


def test_history_that_was_sampled_re_enters_as_the_sampled_ids(server: SmallServer) -> None:
    first = chat(server, "/t/turns/v1", return_token_ids=True).json()
    history = [*HI, first["choices"][0]["message"], {"role": "user", "content": "and?"}]
    second = chat(server, "/t/turns/v1", messages=history, return_token_ids=True).json()
    seen = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
    assert second["prompt_token_ids"][: len(seen)] == seen
    recorded = server.ledger.completion(second["choices"][0]["provenance_id"])
    assert recorded.parent == first["choices"][0]["provenance_id"]
    assert recorded.branch is BranchReason.continues


def test_the_trajectory_comes_from_the_path_or_the_header(server: SmallServer) -> None:
    chat(server, "/t/by-path/v1")
    chat(server, headers={"x-apprentice-trajectory": "by-header"})
    assert len(server.ledger.completions("by-path")) == 1
    assert len(server.ledger.completions("by-header")) == 1
    both = chat(server, "/t/by-path/v1", headers={"x-apprentice-trajectory": "by-header"})
    assert (both.status_code, both.json()["error"]["param"]) == (400, "x-apprentice-trajectory")


def test_an_unknown_trajectory_is_opened_for_the_policy_that_is_called(server: SmallServer) -> None:
    chat(server, "/t/fresh/v1")
    trajectory = server.ledger.trajectory("fresh")
    assert (trajectory.policy, trajectory.status) == (POLICY, TrajectoryStatus.open)


def test_the_origin_header_is_recorded(server: SmallServer) -> None:
    origin = {"agent": "planner", "node": "plan", "attempt": 2, "extra": {"näme": "ü"}}
    chat(server, "/t/origin/v1", headers={"x-apprentice-origin": json.dumps(origin)})
    recorded = server.ledger.completions("origin")[0].origin
    assert (recorded.agent, recorded.node, recorded.attempt, recorded.extra) == ("planner", "plan", 2, {"näme": "ü"})


def test_a_finished_trajectory_takes_no_more_calls(server: SmallServer) -> None:
    chat(server, "/t/over/v1")
    assert server.http.post(f"{server.url}/api/trajectories/over/finish", json={"reward": 1.0}).status_code == 204
    refused = chat(server, "/t/over/v1")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "trajectory_state")
    assert len(server.ledger.completions("over")) == 1


def test_a_call_that_outlives_its_trajectory_gets_no_reply_as_if_recorded(tmp_path: Path) -> None:
    engine = holding(TEXT, 3)
    with small_server(tmp_path, engine=engine) as server, httpx.Client(base_url=server.url) as client:
        path = "/t/late/v1/chat/completions"
        with client.stream("POST", path, json={"model": POLICY, "messages": HI, "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            server.ledger.finish_trajectory("late")
            server.loop.call_soon_threadsafe(engine.release.set)
            rest = [line for line in lines if line]
    assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "trajectory_state"
    assert not any("[DONE]" in line or '"stop"' in line for line in rest)
    assert server.url


def test_unattributed_calls_are_served_and_counted_loudly(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "apprentice.server"), small_server(tmp_path) as server:
        assert [chat(server).status_code for _ in range(2)] == [200, 200]
        health = server.http.get(f"{server.url}/health").json()
        metrics = server.http.get(f"{server.url}/metrics").text
    assert health["unattributed_calls"] == 2
    assert "apprentice_unattributed_calls_total 2.0" in metrics
    assert sum("without a trajectory id" in record.message for record in caplog.records) == 1


def test_the_alias_is_the_newest_version_at_each_request_and_a_pinned_name_is_not(tmp_path: Path) -> None:
    with small_server(tmp_path) as server:
        assert chat(server).json()["policy_version"] == 0
        server.on_loop(server.registry.publish(POLICY, 3))
        assert chat(server).json()["policy_version"] == 3
        pinned = chat(server, model=f"{POLICY}@0").json()
        assert (pinned["policy_version"], pinned["model"]) == (0, f"{POLICY}@0")
        base = chat(server, "/t/base/v1", model=BASE_NAME).json()
        recorded = server.ledger.completions("base")[0]
    assert base["policy_version"] is None
    assert (recorded.policy, recorded.policy_version) == (BASE_NAME, None)


def test_the_models_route_lists_what_can_be_called(server: SmallServer) -> None:
    listed = server.http.get(f"{server.url}/v1/models").json()
    assert [entry["id"] for entry in listed["data"]] == [POLICY, BASE_NAME]
    for name in (POLICY, f"{POLICY}@0", BASE_NAME):
        assert server.http.get(f"{server.url}/v1/models/{name}").json()["id"] == name
    assert server.http.get(f"{server.url}/t/some/v1/models").json() == listed
    missing = server.http.get(f"{server.url}/v1/models/mail/agent@9")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


def test_a_ledger_that_cannot_write_gives_an_error_and_no_reply(tmp_path: Path) -> None:
    engine = holding(TEXT, 3)
    with small_server(tmp_path, engine=engine) as server, httpx.Client(base_url=server.url) as client:
        with client.stream("POST", "/t/lost/v1/chat/completions", json={"model": POLICY, "messages": HI, "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            server.ledger.close()
            server.loop.call_soon_threadsafe(engine.release.set)
            rest = [line for line in lines if line]
        plain = chat(server)
    assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "ledger_error"
    assert not any("[DONE]" in line for line in rest)
    assert (plain.status_code, plain.json()["error"]["code"]) == (503, "ledger_error")


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_stops_the_sampling_and_the_partial_reply_is_kept(tmp_path: Path, stream: bool) -> None:
    engine = holding(TEXT, 4)
    with small_server(tmp_path, engine=engine) as server:
        body = json.dumps({"model": POLICY, "messages": HI, "stream": stream}).encode()
        with raw_request(server, "/t/gone/v1/chat/completions", body):
            assert engine.holding.wait(20)
        kept = eventually(lambda: server.ledger.completions("gone"))
        assert eventually(lambda: engine.stats().running == 0)
    assert [completion.finish_reason for completion in kept] == [FinishReason.aborted]
    assert server.tokenizer.decode(list(kept[0].token_ids)) == "Hell"
    assert kept[0].message["content"] == "Hell"
    assert len(kept[0].logprobs) == 4


def test_a_client_that_leaves_before_its_turn_leaves_the_queue(tmp_path: Path) -> None:
    engine = holding(TEXT, 4)
    with small_server(tmp_path, engine=engine, limits=Limits(running_per_engine=1)) as server:
        body = json.dumps({"model": POLICY, "messages": HI}).encode()
        with raw_request(server, "/t/first/v1/chat/completions", body):
            assert engine.holding.wait(20)
            with raw_request(server, "/t/second/v1/chat/completions", body):
                eventually(lambda: load(server) == (1, 1))
            eventually(lambda: load(server) == (0, 1))
        eventually(lambda: load(server) == (0, 0))
        assert server.ledger.completions("second") == ()


@pytest.mark.parametrize("stream", [True, False])
def test_calls_over_the_bound_of_the_queue_are_turned_away(tmp_path: Path, stream: bool) -> None:
    engine = holding(TEXT, 4)
    with small_server(tmp_path, engine=engine, limits=Limits(running_per_engine=1, waiting_per_engine=1)) as server:
        body = json.dumps({"model": POLICY, "messages": HI}).encode()
        with raw_request(server, "/v1/chat/completions", body), raw_request(server, "/v1/chat/completions", body):
            eventually(lambda: load(server) == (1, 1))
            full = chat(server, stream=stream)
    assert (full.status_code, full.json()["error"]["code"]) == (429, "queue_full")
    assert int(full.headers["retry-after"]) >= 1


def test_a_call_whose_turn_does_not_come_in_time_is_told_so(tmp_path: Path) -> None:
    engine = holding(TEXT, 4)
    body = json.dumps({"model": POLICY, "messages": HI}).encode()
    limits = Limits(running_per_engine=1, queue_seconds=0.05)
    with small_server(tmp_path, engine=engine, limits=limits) as server, raw_request(server, "/v1/chat/completions", body):
        assert engine.holding.wait(20)
        expired = chat(server)
    assert (expired.status_code, expired.json()["error"]["code"]) == (504, "deadline_exceeded")


def test_stopping_the_server_keeps_what_was_sampled(tmp_path: Path) -> None:
    engine = holding(TEXT, 4)
    with small_server(tmp_path, engine=engine, limits=Limits(shutdown_seconds=0)) as server:
        body = json.dumps({"model": POLICY, "messages": HI}).encode()
        with raw_request(server, "/t/stop/v1/chat/completions", body):
            assert engine.holding.wait(20)
            server.stop()
            kept = server.ledger.completions("stop")
    assert [completion.finish_reason for completion in kept] == [FinishReason.aborted]


def test_replies_of_a_model_can_be_sent_back_as_clients_dump_them(server: SmallServer) -> None:
    echoed = {
        "role": "assistant",
        "content": "a",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    chat(server, "/t/echo/v1", messages=[*HI, echoed, {"role": "user", "content": [{"type": "text", "text": "b"}]}])
    messages = server.ledger.completions("echo")[0].request.messages
    assert messages[1] == {"role": "assistant", "content": "a"}


def load(server: SmallServer) -> tuple[int, int]:
    health = server.http.get(f"{server.url}/health").json()
    return health["queued"], health["running"]


def raw_request(server: SmallServer, path: str, body: bytes) -> Any:
    """A connection on which the request was sent; closing it is the client going away."""
    import socket

    connection = socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def test_the_tokenizer_of_these_tests_spells_any_text() -> None:
    tokenizer = tiny_tokenizer()
    assert tokenizer.decode(tokenizer.encode(TEXT, add_special_tokens=False)) == TEXT
