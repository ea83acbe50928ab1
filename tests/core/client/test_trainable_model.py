"""`TrainableModel` against a real server: registration, train jobs under faults, checkpoints, forks, OpenAI clients."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
from support.client_server import QUICK, ClientServer, client_server
from support.small_registry import eventually

from apprentice import RemoteBackend, TrainableModel, TrainConfig, TrajectoryGroup
from apprentice.core.client import following
from apprentice.core.client.progress import Silent
from apprentice.core.errors import ConfigError, InvalidRequest, TrainJobFailed, UnknownModel
from apprentice.core.records import TrainStatus, Trajectory
from apprentice.core.wire import GrpoJob, SftJob


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientServer]:
    with client_server(tmp_path_factory.mktemp("model")) as server:
        yield server


@pytest.fixture
def server(running: ClientServer) -> ClientServer:
    return running.fresh()


async def group(model: TrainableModel, *rewards: float | None) -> TrajectoryGroup:
    made: list[Trajectory] = []
    for reward in rewards:
        async with model.trajectory() as t:
            t.reward = reward
        made.append(t.record())
    return TrajectoryGroup(trajectories=tuple(made))


class Notes(Silent):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


async def test_training_moves_the_step_and_sends_ids_rewards_and_options(server: ClientServer) -> None:
    model = await server.model()
    groups = [await group(model, 0.0, 1.0)]
    result = await model.train(groups, TrainConfig(beta=0.1), learning_rate=3e-4, progress=False)
    assert (result.status, result.previous_step, result.step) == (TrainStatus.trained, 0, 1)
    assert await model.get_step() == 1
    (request,) = server.jobs.requests
    assert isinstance(request, GrpoJob)
    assert [(t.id, t.reward) for t in request.groups[0]] == [(t.id, t.reward) for t in groups[0].trajectories]
    assert (request.config.beta, request.config.learning_rate) == (0.1, 3e-4)


@pytest.mark.parametrize("fault", ["lose_request", "lose_answer", "refuse_503"])
async def test_a_lost_answer_never_trains_twice(server: ClientServer, fault: str) -> None:
    model = await server.model()
    groups = [await group(model, 0.0, 1.0)]
    server.faults.add("POST", "/api/train-jobs", fault, times=2)  # type: ignore[arg-type]
    result = await model.train(groups, progress=False)
    assert result.step == 1
    assert len(server.jobs.requests) == 1


async def test_two_calls_with_the_same_groups_are_two_jobs(server: ClientServer) -> None:
    model = await server.model()
    groups = [await group(model, 0.0, 1.0)]
    assert (await model.train(groups, progress=False)).step == 1
    assert (await model.train(groups, progress=False)).step == 2


async def test_events_are_followed_over_broken_streams_to_the_end(server: ClientServer) -> None:
    model = await server.model()
    server.jobs.held = True
    notes = Notes()
    server.faults.add("GET", "/api/train-jobs/.*/events", "lose_request", times=1)
    running = asyncio.create_task(model.train([await group(model, 0.0, 1.0)], progress=notes))
    await asyncio.to_thread(eventually, lambda: "train job: loading" in notes.texts)
    assert not running.done()
    job = (await asyncio.to_thread(server.server.ledger.jobs))[-1]
    await asyncio.to_thread(server.server.on_loop, server.jobs.complete(job))
    assert (await running).step == 1
    assert "the event stream broke, joining again" in notes.texts


async def test_where_streams_never_get_through_polling_finds_the_end(server: ClientServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "POLL_SECONDS", 0.01)
    model = await server.model()
    server.jobs.held = True
    server.faults.add("GET", "/api/train-jobs/.*/events", "lose_request", times=100)
    running = asyncio.create_task(model.train([await group(model, 0.0, 1.0)], progress=False))
    await asyncio.to_thread(eventually, lambda: sum("/events" in line for line in server.faults.seen) == following.STREAM_TRIES)
    job = (await asyncio.to_thread(server.server.ledger.jobs))[-1]
    await asyncio.to_thread(server.server.on_loop, server.jobs.complete(job))
    assert (await running).step == 1
    assert sum("/events" in line for line in server.faults.seen) == following.STREAM_TRIES


async def test_a_failed_job_raises_with_its_reason_and_id(server: ClientServer) -> None:
    model = await server.model()
    server.jobs.fail_with = "the canary found stale weights"
    with pytest.raises(TrainJobFailed, match="the canary found stale weights") as caught:
        await model.train([await group(model, 0.0, 1.0)], progress=False)
    assert str(caught.value.details["job_id"]).startswith("job-")
    assert await model.get_step() == 0


async def test_a_job_that_shows_no_sign_of_life_is_given_up(server: ClientServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from apprentice.core.errors import DeadlineExceeded

    monkeypatch.setattr(following, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(following, "HEARTBEAT_LIMIT", 0.05)
    model = await server.model()
    server.jobs.held = True
    server.faults.add("GET", "/api/train-jobs/.*/events", "lose_request", times=100)
    with pytest.raises(DeadlineExceeded, match="no sign of life"):
        await model.train([await group(model, 0.0, 1.0)], progress=False)


async def test_what_cannot_be_trained_on_is_refused_in_one_sentence(server: ClientServer) -> None:
    model = await server.model()
    with pytest.raises(InvalidRequest, match="no group has a trajectory"):
        await model.train([], progress=False)
    with pytest.raises(InvalidRequest, match="group 1 has no trajectories"):
        await model.train([await group(model, 1.0), TrajectoryGroup(trajectories=())], progress=False)
    with pytest.raises(ConfigError, match="train option 'learningrate'"):
        await model.train([await group(model, 1.0)], progress=False, learningrate=1e-4)
    with pytest.raises(ConfigError, match="train option 'loss_type'"):
        await model.train([await group(model, 1.0)], progress=False, loss_type="ppo")
    assert not server.jobs.requests


async def test_a_group_whose_rollouts_all_failed_is_left_out(server: ClientServer) -> None:
    model = await server.model()
    good, empty = await group(model, 0.0, 1.0), TrajectoryGroup(trajectories=(), failures=("KeyError: x",))
    await model.train([empty, good], progress=False)
    (request,) = server.jobs.requests
    assert isinstance(request, GrpoJob)
    assert len(request.groups) == 1


async def test_supervised_training_takes_demonstrations_and_recorded_trajectories(server: ClientServer) -> None:
    model = await server.model()
    async with model.trajectory() as t:
        pass
    messages = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"})
    await model.train_sft([{"messages": messages}, t], epochs=2, progress=False)
    (request,) = server.jobs.requests
    assert isinstance(request, SftJob)
    assert (request.trajectories, request.demonstrations[0].messages, request.config.epochs) == ((t.id,), messages, 2)
    with pytest.raises(InvalidRequest, match="example 0"):
        await model.train_sft([{"message": []}], progress=False)
    with pytest.raises(InvalidRequest, match="nothing to learn from"):
        await model.train_sft([], progress=False)


async def test_checkpoints_are_listed_pinned_and_deleted(server: ClientServer) -> None:
    model = await server.model()
    for _ in range(2):
        await model.train([await group(model, 0.0, 1.0)], progress=False)
    assert [checkpoint.step for checkpoint in await model.checkpoints()] == [1, 2]
    await model.pin_checkpoint(2)
    assert (await model.checkpoint(2)).pinned
    await model.delete_checkpoint(1)
    assert [checkpoint.step for checkpoint in await model.checkpoints()] == [2]


async def test_a_fork_says_where_it_comes_from_and_is_ready(server: ClientServer) -> None:
    model = await server.model()
    await model.train([await group(model, 0.0, 1.0)], progress=False)
    fork = await model.fork("fork-b")
    assert fork.policy == "mail/fork-b"
    assert fork.spec.fork_from == f"{model.policy}@1"
    registered = await asyncio.to_thread(server.server.ledger.policies)
    assert next(body for body in registered if body.name == "fork-b").fork_from == f"{model.policy}@1"


async def test_an_unknown_base_model_and_bad_names_are_refused(server: ClientServer) -> None:
    with pytest.raises(UnknownModel):
        await TrainableModel("mail", "x", "no-such-model").register(RemoteBackend(server.url, retry=QUICK))
    for project, name in (("../etc", "a"), ("mail", ""), ("mail", "a/b")):
        with pytest.raises(ConfigError):
            TrainableModel(project, name, "tiny")


async def test_an_openai_client_made_outside_attributes_each_call_to_the_trajectory_around_it(server: ClientServer) -> None:
    model = await server.model()
    client = model.openai_client()

    async def rollout(number: int) -> str:
        async with model.trajectory() as t:
            messages = [{"role": "user", "content": f"question {number}"}]
            await client.chat.completions.create(model=model.inference_name, messages=messages)  # type: ignore[arg-type]
        return t.id

    before = (await model.api.health()).unattributed_calls
    ids = await asyncio.gather(*(rollout(number) for number in range(12)))
    for number, trajectory_id in enumerate(ids):
        (completion,) = (await model.fetch(trajectory_id)).completions
        assert completion.request.messages[0]["content"] == f"question {number}"
    await client.chat.completions.create(model=model.inference_name, messages=[{"role": "user", "content": "alone"}])
    assert (await model.api.health()).unattributed_calls == before + 1


async def test_the_sync_openai_client_attributes_calls_from_threads(server: ClientServer) -> None:
    model = await server.model()
    client = model.sync_openai_client()

    def ask() -> str | None:
        messages = [{"role": "user", "content": "hi"}]
        return client.chat.completions.create(model=model.inference_name, messages=messages).choices[0].message.content  # type: ignore[arg-type]

    async with model.trajectory() as t:
        assert await asyncio.to_thread(ask) == "yes"
    assert len((await model.fetch(t)).completions) == 1


def test_one_openai_client_works_in_several_event_loops_at_once(server: ClientServer) -> None:
    model = asyncio.run(server.model())
    client = model.openai_client()
    found: list[int] = []

    async def rollout() -> int:
        async with model.trajectory() as t:
            await client.chat.completions.create(model=model.inference_name, messages=[{"role": "user", "content": "hi"}])
        return len((await model.fetch(t)).completions)

    threads = [threading.Thread(target=lambda: found.append(asyncio.run(rollout()))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [1, 1, 1]


async def test_closing_an_openai_client_leaves_the_model_usable(server: ClientServer) -> None:
    model = await server.model()
    async with model.openai_client() as client:
        await client.chat.completions.create(model=model.inference_name, messages=[{"role": "user", "content": "hi"}])
    assert await model.get_step() == 0
    with pytest.raises(ConfigError, match="http_client cannot be replaced"):
        model.openai_client(http_client=None)
