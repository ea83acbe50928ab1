"""`model.trajectory()` over real HTTP: what is recorded, what is refused, how it ends."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator

import httpx
import pytest
from support.client_server import ClientServer, client_server

from apprentice import Scenario, current_trajectory
from apprentice.core.client.scope import INTERRUPTED
from apprentice.core.client.values import as_scenarios
from apprentice.core.errors import InvalidRequest, ServerUnavailable, TrajectoryStateError, UnknownTrajectory
from apprentice.core.records import TrajectoryStatus


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientServer]:
    with client_server(tmp_path_factory.mktemp("scope")) as running:
        yield running


async def test_a_finished_scope_is_recorded_with_its_reward_metrics_and_metadata(server: ClientServer) -> None:
    model = await server.model()
    async with model.trajectory(Scenario(id="s1", input="x"), group_id="g1", metadata={"split": "train"}) as t:
        t.reward = 0.5
        t.metrics["turns"] = 3
        t.metadata["note"] = {"a": [1, None]}
    stored = await model.fetch(t)
    assert (stored.status, stored.reward, stored.metrics) == (TrajectoryStatus.finished, 0.5, {"turns": 3.0})
    assert (stored.scenario_id, stored.group_id) == ("s1", "g1")
    assert stored.metadata == {"split": "train", "note": {"a": [1, None]}}
    assert t.record().model_copy(update={"created_at": 0.0}) == stored.model_copy(update={"created_at": 0.0, "finished_at": None})


@pytest.mark.parametrize("bad", [10**400, math.nan, math.inf, -math.inf, "1.0", None.__class__, [1]])
async def test_a_reward_that_is_no_finite_number_is_refused_at_once(server: ClientServer, bad: object) -> None:
    model = await server.model()
    async with model.trajectory() as t:
        t.reward = 0.25
        with pytest.raises(InvalidRequest, match="reward must be a finite number"):
            t.reward = bad  # type: ignore[assignment]
        with pytest.raises(InvalidRequest, match=r"metrics\['m'\] must be a finite number"):
            t.metrics["m"] = bad  # type: ignore[assignment]
        with pytest.raises(InvalidRequest, match="completion_rewards"):
            t.completion_rewards["cmp-1"] = bad  # type: ignore[assignment]
    assert (await model.fetch(t)).reward == 0.25


async def test_an_exception_fails_the_trajectory_with_its_sentence_and_gives_no_reward(server: ClientServer) -> None:
    model = await server.model()
    with pytest.raises(KeyError):  # noqa: PT012
        async with model.trajectory() as t:
            t.reward = 1.0
            raise KeyError("no such\n  mail")
    stored = await model.fetch(t)
    assert (stored.status, stored.error, stored.reward) == (TrajectoryStatus.failed, r"KeyError: 'no such\n mail'", None)


async def test_a_cancelled_scope_is_failed_as_interrupted_and_the_cancellation_goes_on(server: ClientServer) -> None:
    model = await server.model()
    scope = model.trajectory()
    inside = asyncio.Event()

    async def rollout() -> None:
        async with scope:
            inside.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(rollout())
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    stored = await model.fetch(scope)
    assert stored.status is TrajectoryStatus.failed
    assert stored.error == f"{INTERRUPTED}the rollout was cancelled"


async def test_an_error_text_that_is_not_unicode_still_reaches_the_server(server: ClientServer) -> None:
    model = await server.model()
    with pytest.raises(ValueError, match="bad"):
        async with model.trajectory() as t:
            raise ValueError("bad \ud800 text")
    assert (await model.fetch(t)).error == "ValueError: bad ? text"


async def test_a_scope_is_used_once(server: ClientServer) -> None:
    model = await server.model()
    scope = model.trajectory()
    async with scope:
        pass
    with pytest.raises(TrajectoryStateError, match="entered before"):
        async with scope:
            pass


async def test_a_reward_set_after_the_block_is_sent_by_settle_and_only_if_it_changed(server: ClientServer) -> None:
    model = await server.model()
    async with model.trajectory() as t:
        t.reward = 0.1
    before = len(server.faults.seen)
    await t.settle()
    assert len(server.faults.seen) == before
    t.reward = 0.9
    await t.settle()
    assert (await model.fetch(t)).reward == 0.9


async def test_the_ambient_trajectory_is_the_innermost_of_the_asked_policy(server: ClientServer) -> None:
    one, two = await server.model(), await server.model("judge")
    assert current_trajectory() is None
    async with one.trajectory() as outer, two.trajectory() as inner:
        assert current_trajectory() is inner
        assert current_trajectory(one.policy) is outer
        assert await asyncio.to_thread(current_trajectory) is inner
    assert current_trajectory() is None


async def test_metadata_that_is_not_json_is_refused_before_anything_is_sent(server: ClientServer) -> None:
    model = await server.model()
    before = len(server.faults.seen)
    with pytest.raises(InvalidRequest, match="metadata must be a JSON object"):
        async with model.trajectory(metadata={"x": object()}):
            pass
    assert len(server.faults.seen) == before


async def test_calls_by_base_url_and_by_header_are_recorded_in_the_trajectory(server: ClientServer) -> None:
    model = await server.model()
    body = {"model": model.inference_name, "messages": [{"role": "user", "content": "hi"}]}
    async with model.trajectory() as t, httpx.AsyncClient() as http:
        (await http.post(f"{t.base_url}/chat/completions", json=body)).raise_for_status()
        (await http.post(f"{model.base_url}/chat/completions", json=body, headers=t.headers)).raise_for_status()
    stored = await model.fetch(t)
    assert [completion.message["content"] for completion in stored.completions] == ["yes", "yes"]
    assert {completion.policy_version for completion in stored.completions} == {0}


async def test_fetching_refuses_a_path_as_an_id(server: ClientServer) -> None:
    model = await server.model()
    with pytest.raises(InvalidRequest, match="an id has letters"):
        await model.fetch("../models")
    with pytest.raises(UnknownTrajectory):
        await model.fetch("nothing")


def test_a_model_without_a_backend_says_what_to_do() -> None:
    from apprentice import TrainableModel

    with pytest.raises(ServerUnavailable, match="register"):
        TrainableModel("mail", "agent", "tiny").trajectory().base_url  # noqa: B018


async def test_a_lone_surrogate_in_a_key_is_refused_and_never_changed_in_silence(server: ClientServer) -> None:
    model = await server.model()
    with pytest.raises(InvalidRequest, match="lone surrogate"):
        await model.trajectory(metadata={"\ud800": 1}).open()
    async with model.trajectory() as t:
        with pytest.raises(InvalidRequest, match="lone surrogate"):
            t.metrics["\ud800"] = 1.0
    with pytest.raises(InvalidRequest, match="scenario 0 holds a lone surrogate"):
        as_scenarios([{"\ud800": "x"}])
