"""The training loop: what it does, and that a kill at any arrow changes nothing of it."""

from __future__ import annotations

import asyncio
import errno
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.client_server import ClientServer, client_server
from support.loop_script import SCENARIOS, WARMUP, make_loop
from support.small_registry import eventually

from apprentice import Budget, EarlyStop, Scenario, TrainingLoop, Trajectory, TrajectoryGroup, TrajectoryScope
from apprentice.core.client.api import ControlApi
from apprentice.core.client.curriculum import Curriculum
from apprentice.core.client.gather import GroupPlan, Member
from apprentice.core.client.resume import restore
from apprentice.core.client.run_state import RunState, exclusive
from apprentice.core.errors import ConfigError, InvalidRequest, RunAborted, TrainJobFailed
from apprentice.core.records import TrajectoryStatus
from apprentice.core.wire import FinishTrajectory, GrpoJob, OpenTrajectory, SftJob


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientServer]:
    with client_server(tmp_path_factory.mktemp("loop")) as server:
        yield server


@pytest.fixture
def server(running: ClientServer) -> ClientServer:
    return running.fresh()


def sent(server: ClientServer) -> list[Any]:
    """The train requests without what differs between runs: the run's id and the attempt of a rollout."""
    found: list[Any] = []
    for request in server.jobs.requests:
        if isinstance(request, SftJob):
            found.append(("sft", request.demonstrations))
        else:
            assert isinstance(request, GrpoJob)
            places = [[(re.sub(r"^run-\w+-|-a\d+$", "", t.id), t.reward) for t in group] for group in request.groups]
            scenarios = [server.stored(group[0].id).scenario_id for group in request.groups]
            found.append(("grpo", scenarios, places, request.config))
    return found


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """The metrics without times."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if not key.startswith("seconds/")} for line in lines]


class KillNow(BaseException):
    """The process ends here, as far as the code can tell."""


def kill_at(arrow: int) -> Callable[[str, RunState], None]:
    count = iter(range(10_000))

    def observer(what: str, state: RunState) -> None:
        if next(count) == arrow:
            raise KillNow(what)

    return observer


UNBROKEN_ARROWS = 2 * (3 + 4 * 2 + 2)


async def test_a_run_goes_through_its_phases_and_leaves_metrics_report_and_state(server: ClientServer, tmp_path: Path) -> None:
    model = await server.model()
    arrows: list[str] = []
    result = await make_loop(model, tmp_path, observer=lambda what, _: arrows.append(what)).run()
    step = ["rollouts", "train", "evaluate", "keep"]
    assert [arrow for arrow in arrows if ":" not in arrow] == ["baseline", "warmup", "warmed", *step, *step, "final", "report"]
    assert len(arrows) == UNBROKEN_ARROWS
    assert (result.steps, result.policy_step, result.stopped) == (2, 3, "the budget of 2 steps is spent")
    assert [point.at for point in result.evaluations] == ["before", "warm-up", "1", "2"]
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]
    assert rows(tmp_path)[0]["rollouts/reward_mean"] == 1.0
    assert rows(tmp_path)[1]["policy_step"] == 3
    assert result.report.read_text().startswith("<!doctype html>")
    report = json.loads((tmp_path / "report.json").read_text())
    assert [bar["name"] for bar in report["bars"]] == ["before", "warm-up", "after"]
    assert "[user]\nheld-out 1" in report["samples"][0]["texts"]["before"]
    assert [line[0] for line in sent(server)] == ["sft", "grpo", "grpo"]


async def test_a_kill_at_any_arrow_changes_nothing_that_is_trained_or_measured(server: ClientServer, tmp_path: Path) -> None:
    await make_loop(await server.model(), tmp_path / "unbroken").run()
    expected, measured = sent(server), rows(tmp_path / "unbroken")
    for arrow in range(UNBROKEN_ARROWS):
        server.fresh()
        model, run_dir = await server.model(), tmp_path / str(arrow)
        with pytest.raises(KillNow):
            await make_loop(model, run_dir, observer=kill_at(arrow)).run()
        result = await make_loop(model, run_dir).run()
        assert sent(server) == expected, f"killed at arrow {arrow}"
        assert rows(run_dir) == measured, f"killed at arrow {arrow}"
        assert [point.at for point in result.evaluations] == ["before", "warm-up", "1", "2"]


async def test_finished_rollouts_of_a_killed_step_are_used_and_open_ones_are_failed_and_made_again(
    server: ClientServer, tmp_path: Path
) -> None:
    await make_loop(await server.model(), tmp_path / "unbroken").run()
    expected = sent(server)
    server.fresh()
    model = await server.model()
    loop = make_loop(model, tmp_path, concurrency=1)
    whole, calls = loop.rollout, 0

    async def dying(scenario: Any) -> Any:
        nonlocal calls
        if scenario.input in SCENARIOS:
            calls += 1
            if calls == 4:
                async with model.trajectory(scenario):
                    raise KillNow
        return await whole(scenario)

    loop.rollout = dying
    with pytest.raises(BaseExceptionGroup):
        await loop.run()
    left = [t for t in await model.api.trajectories(policy=model.policy) if "-s00001-" in t.id]
    assert [t.status for t in left] == [TrajectoryStatus.finished] * 3 + [TrajectoryStatus.open]
    calls_before = server.faults.seen.count("POST /v1/chat/completions")
    await make_loop(model, tmp_path).run()
    assert sent(server) == expected
    assert server.faults.seen.count("POST /v1/chat/completions") - calls_before == 3 + 6 + 2 * 2
    request = server.jobs.requests[1]
    assert isinstance(request, GrpoJob)
    ids = [t.id for group in request.groups for t in group]
    assert [id_[-3:] for id_ in ids] == ["-a0", "-a0", "-a0", "-a1", "-a0", "-a0"]
    assert {t.id for t in left[:3]} == set(ids[:3])
    assert server.stored(left[3].id).status is TrajectoryStatus.failed


@pytest.mark.parametrize("when", ["during rollouts", "during the train job"])
async def test_a_killed_process_is_resumed_by_the_next(server: ClientServer, tmp_path: Path, when: str) -> None:
    await make_loop(await server.model(), tmp_path / "unbroken").run()
    expected, measured = sent(server), rows(tmp_path / "unbroken")
    server.fresh()
    await server.model()
    script = Path(__file__).parents[2] / "support" / "loop_script.py"
    command = [sys.executable, str(script), server.url, server.name, str(tmp_path / "run")]
    server.jobs.held = when == "during the train job"
    if not server.jobs.held:
        server.faults.add("POST", ".*-s00001-g001-m002-a0/finish", "hold")

    def reached() -> bool:
        """Once true it stays so: the process waits for the server, however late the kill comes."""
        if server.jobs.held:
            return len(server.server.ledger.jobs("running")) == 1
        return sum("/finish" in line for line in server.faults.seen) == 2 + 2 + 6

    process = await asyncio.to_thread(subprocess.Popen, command)
    try:
        await asyncio.to_thread(eventually, reached, 60)
        process.send_signal(signal.SIGKILL)
        assert await asyncio.to_thread(process.wait) == -signal.SIGKILL
    finally:
        process.kill()
    if server.jobs.held:
        server.jobs.held = False
        (job,) = await asyncio.to_thread(server.server.ledger.jobs, "running")
        await asyncio.to_thread(server.server.on_loop, server.jobs.complete(job))
    again = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=120)
    assert again.returncode == 0, again.stderr
    assert sent(server) == expected
    assert rows(tmp_path / "run") == measured


async def test_a_rollout_that_a_late_request_of_the_killed_process_finishes_is_used(server: ClientServer) -> None:
    model = await server.model()
    await model.api.open_trajectory(OpenTrajectory(id="g-m000-a0", policy=model.policy, group_id="g"))

    class LateRequest(ControlApi):
        async def trajectories(self, **query: Any) -> list[Trajectory]:
            found = await super().trajectories(**query)
            await self.finish("g-m000-a0", FinishTrajectory(reward=1.0))
            return found

    member = Member(prefix="g-m000")
    await restore(LateRequest(model.transport), [GroupPlan(Scenario(id="s", input=0), [member], "g", {})], rewards_needed=True)
    assert member.result is not None
    assert (member.result.id, member.result.status, member.result.reward) == ("g-m000-a0", TrajectoryStatus.finished, 1.0)


async def test_a_rollout_that_failed_by_itself_stays_failed_after_a_resume(server: ClientServer, tmp_path: Path) -> None:
    model = await server.model()
    failing = True

    def loop(observer: Any = None) -> TrainingLoop:
        made = make_loop(model, tmp_path, observer=observer, warmup=(), eval_scenarios=(), budget=Budget(steps=1))
        whole = made.rollout

        async def rollout(scenario: Any) -> Any:
            if failing:
                async with model.trajectory(scenario) as t:
                    if "-m000-" in t.id:
                        raise ValueError("the agent gave up")
                    t.reward = float(t.id.rpartition("-m")[2].partition("-")[0])
                return t
            return await whole(scenario)

        made.rollout = rollout
        return made

    arrow = 2 * 3  # baseline, warmup and warmed do nothing here; then the rollouts end, unsaved
    with pytest.raises(KillNow):
        await loop(kill_at(arrow)).run()
    failing = False
    await loop().run()
    (row,) = rows(tmp_path)
    assert (row["rollouts/finished"], row["rollouts/failed"]) == (4, 2)


async def test_a_reward_function_scores_the_groups_and_its_scores_are_recorded(server: ClientServer, tmp_path: Path) -> None:
    model = await server.model()

    async def reward(groups: list[TrajectoryGroup]) -> list[TrajectoryGroup]:
        return [
            group.model_copy(update={"trajectories": tuple(t.with_reward(float(i), judged=1.0) for i, t in enumerate(group.trajectories))})
            for group in groups
        ]

    await make_loop(model, tmp_path, reward=reward, warmup=(), budget=Budget(steps=1)).run()
    (request,) = server.jobs.requests
    assert isinstance(request, GrpoJob)
    for group in request.groups:
        assert [t.reward for t in group] == [0.0, 1.0, 2.0]
        assert [server.stored(t.id).reward for t in group] == [0.0, 1.0, 2.0]
    assert rows(tmp_path)[0]["rollout/judged"] == 1.0


async def test_a_run_stops_at_its_target_or_when_nothing_gets_better(server: ClientServer, tmp_path: Path) -> None:
    model = await server.model()
    goal = await make_loop(model, tmp_path / "goal", early_stop=EarlyStop(target=0.0), warmup=()).run()
    assert (goal.steps, goal.stopped) == (0, "the evaluation reached its target of 0")
    dull = await make_loop(model, tmp_path / "dull", early_stop=EarlyStop(patience=2), warmup=(), budget=Budget(steps=50)).run()
    assert (dull.steps, dull.stopped) == (2, "2 evaluations in a row brought no new best")


async def test_a_budget_in_tokens_or_seconds_ends_the_run(server: ClientServer, tmp_path: Path) -> None:
    model = await server.model()
    plain: dict[str, Any] = {"warmup": (), "eval_scenarios": ()}
    tokens = await make_loop(model, tmp_path / "tokens", budget=Budget(tokens=250), **plain).run()
    assert Budget(steps=1).spent(1, 0, 0) == "the budget of 1 step is spent"
    assert (tokens.steps, tokens.stopped) == (3, "the budget of 250 trained tokens is spent")
    seconds = await make_loop(model, tmp_path / "seconds", budget=Budget(seconds=1e-9), **plain).run()
    assert (seconds.steps, seconds.stopped) == (0, "the budget of 1e-09 s is spent")


async def test_a_finished_run_is_not_run_again_unless_its_budget_grew(server: ClientServer, tmp_path: Path) -> None:
    model = await server.model()
    await make_loop(model, tmp_path).run()
    count = len(server.jobs.requests)
    assert (await make_loop(model, tmp_path).run()).steps == 2
    assert len(server.jobs.requests) == count
    grown = await make_loop(model, tmp_path, budget=Budget(steps=3)).run()
    assert (grown.steps, len(server.jobs.requests)) == (3, count + 1)


async def test_the_best_checkpoint_is_pinned_and_the_one_before_is_not(server: ClientServer, tmp_path: Path) -> None:
    model = await server.model()
    level = {"before": 0.0, "1": 1.0, "2": 3.0, "3": 2.0}

    async def eval_reward(groups: list[TrajectoryGroup]) -> list[TrajectoryGroup]:
        at = re.search(r"-e-(\w+)-g", groups[0].trajectories[0].id)
        assert at is not None
        return [
            group.model_copy(update={"trajectories": tuple(t.with_reward(level[at[1]]) for t in group.trajectories)}) for group in groups
        ]

    result = await make_loop(model, tmp_path, eval_reward=eval_reward, warmup=(), budget=Budget(steps=3)).run()
    assert result.best_step == 2
    assert [(checkpoint.step, checkpoint.pinned) for checkpoint in await model.checkpoints()] == [(1, False), (2, True), (3, False)]


@pytest.mark.parametrize("warmup", [WARMUP, ()])
@pytest.mark.parametrize("kept", [True, False])
async def test_a_failed_job_ends_the_run_with_its_reason_and_is_submitted_anew_on_resume(
    server: ClientServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warmup: Any, kept: bool
) -> None:
    model = await server.model()
    server.jobs.fail_with = "no space left on device"
    save = RunState.save

    def no_space(state: RunState, folder: Path) -> None:
        if state.attempt and not kept:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(state, folder)

    monkeypatch.setattr(RunState, "save", no_space)
    for failures in (1, 2):
        with pytest.raises(TrainJobFailed, match="no space left on device"):
            await make_loop(model, tmp_path, warmup=warmup, eval_scenarios=()).run()
        assert len(server.jobs.requests) == failures
    server.jobs.fail_with = None
    result = await make_loop(model, tmp_path, warmup=warmup, eval_scenarios=()).run()
    assert result.steps == 2
    assert len(server.jobs.requests) == 2 + 2 + bool(warmup)


async def test_a_run_of_failed_rollouts_ends_the_run_with_the_cause(server: ClientServer, tmp_path: Path) -> None:
    loop = make_loop(await server.model(), tmp_path, warmup=(), eval_scenarios=())

    async def broken(scenario: Any) -> Any:
        raise ZeroDivisionError("division by zero")

    loop.rollout = broken
    with pytest.raises(RunAborted, match="ZeroDivisionError: division by zero"):
        await loop.run()


async def test_a_run_dir_of_something_else_is_refused(server: ClientServer, tmp_path: Path) -> None:
    model = await server.model()
    await make_loop(model, tmp_path, warmup=(), eval_scenarios=(), budget=Budget(steps=1)).run()
    other = make_loop(model, tmp_path)
    other.scenarios = other.scenarios[1:]
    with pytest.raises(ConfigError, match="started with other scenarios"):
        await other.run()
    with pytest.raises(ConfigError, match=f"holds a run of {model.policy}"):
        await make_loop(await server.model("somebody-else"), tmp_path).run()
    server.server.registry.versions[model.policy] = 0
    with pytest.raises(ConfigError, match=r"brought .* to step 1, but the server has it at step 0"):
        await make_loop(model, tmp_path).run()
    (tmp_path / "state.json").write_text('{"format": 2}')
    with pytest.raises(ConfigError, match="not the state of a run that this version can resume"):
        await make_loop(model, tmp_path).run()


async def test_two_processes_cannot_run_in_one_folder(server: ClientServer, tmp_path: Path) -> None:
    model = await server.model()
    with exclusive(tmp_path), pytest.raises(ConfigError, match="another process is running"):
        await make_loop(model, tmp_path).run()


async def test_wrong_settings_are_refused_in_one_sentence(server: ClientServer, tmp_path: Path) -> None:
    model = await server.model()
    with pytest.raises(ConfigError, match="needs a budget"):
        make_loop(model, tmp_path, budget=Budget())
    with pytest.raises(InvalidRequest, match="group_size must be at least 2"):
        make_loop(model, tmp_path, group_size=1)
    with pytest.raises(InvalidRequest, match="eval_every must be at least 1"):
        make_loop(model, tmp_path, eval_every=0)
    (tmp_path / "file").write_text("")
    for run_dir in ("file", "file/below", "x" * 300, "a\0b"):
        with pytest.raises(ConfigError, match="cannot be made"):
            await make_loop(model, tmp_path / run_dir).run()


async def test_a_loop_with_a_curriculum_remembers_solve_rates_and_draws_by_them(server: ClientServer, tmp_path: Path) -> None:
    model = await server.model()

    async def rollout(scenario: Scenario) -> TrajectoryScope:
        async with model.trajectory(scenario) as t:
            t.reward = t.metrics["success"] = float(scenario.input == "easy")
        return t

    scenarios = [Scenario(id=name, input=name) for name in ("easy", "hard", "open")]
    loop = TrainingLoop(
        model, rollout, scenarios, budget=Budget(steps=1), run_dir=tmp_path, group_size=2, groups_per_step=2,
        curriculum=Curriculum("success"), progress=False,
    )  # fmt: skip
    await loop.run()
    state = RunState.load(tmp_path)
    assert state is not None
    assert state.solve_rates == {name: float(name == "easy") for name in state.solve_rates}
    assert len(state.solve_rates) == 2


@pytest.mark.parametrize("solved", ["easy", "nothing"])
async def test_the_base_model_tells_how_hard_the_scenarios_are_if_it_solves_any(server: ClientServer, tmp_path: Path, solved: str) -> None:
    model = await server.model()
    purposes: list[tuple[object, object]] = []

    async def rollout(scenario: Scenario) -> TrajectoryScope:
        async with model.trajectory(scenario) as t:
            purposes.append((t.metadata.get("purpose"), scenario.input))
            t.reward = t.metrics["success"] = float(scenario.input == solved)
        return t

    scenarios = [Scenario(id=name, input=name) for name in ("easy", "hard", "open")]
    loop = TrainingLoop(
        model, rollout, scenarios, eval_scenarios=[Scenario(input="easy")], budget=Budget(steps=1), run_dir=tmp_path, group_size=2,
        groups_per_step=1, curriculum=Curriculum("success", attempts=2), progress=False,
    )  # fmt: skip
    await loop.run()
    measured = [name for purpose, name in purposes if purpose == "difficulty"]
    state = RunState.load(tmp_path)
    assert state is not None
    if solved == "nothing":
        assert not measured
    else:
        assert sorted(measured) == ["easy", "easy", "hard", "hard", "open", "open"]
        assert state.solve_rates == {"easy": 1.0, "hard": 0.0, "open": 0.0}
