"""`gather` and `evaluate`: groups, failures, retries, deadlines, cancellation, intervals."""

from __future__ import annotations

import asyncio
import io
import random
import statistics
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.client_server import QUICK, ClientServer, Fault, client_server

from apprentice import Scenario, TrainableModel, Trajectory, TrajectoryGroup, gather, gather_trajectory_groups
from apprentice.core.client.evaluate import Evaluation, interval, summarise, wilson
from apprentice.core.client.gather import FailureBudget, GatherSettings, GroupPlan, Member, run_plans
from apprentice.core.client.progress import Plain, Silent, sparkline
from apprentice.core.client.run_report import verdict
from apprentice.core.client.scope import INTERRUPTED
from apprentice.core.client.transport import RetryPolicy
from apprentice.core.client.values import as_scenarios
from apprentice.core.errors import EngineError, InvalidRequest, RolloutError, RunAborted, ServerUnavailable
from apprentice.core.records import TrajectoryStatus


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientServer]:
    with client_server(tmp_path_factory.mktemp("gather")) as server:
        yield server


@pytest.fixture
def server(running: ClientServer) -> ClientServer:
    return running.fresh()


async def quick(rollout: Any, scenarios: list[Any], size: int = 2, **settings: Any) -> list[TrajectoryGroup]:
    """`gather` with short back-off."""
    plans = [GroupPlan(scenario, [Member() for _ in range(size)]) for scenario in as_scenarios(scenarios)]
    backoff = RetryPolicy(first_seconds=0.001, longest_seconds=0.002)
    return await run_plans(rollout, plans, GatherSettings(backoff=backoff, **settings), Silent(), "rollouts")


async def test_each_scenario_gives_one_group_in_order_with_one_group_id(server: ClientServer) -> None:
    model = await server.model()

    async def rollout(scenario: Scenario) -> Any:
        async with model.trajectory(scenario) as t:
            t.reward = float(scenario.input)  # type: ignore[arg-type]
        return t

    groups = await gather(rollout, [3, Scenario(id="five", input=5)], group_size=3, progress=False)
    assert [[t.reward for t in group.trajectories] for group in groups] == [[3.0] * 3, [5.0] * 3]
    assert groups[1].scenario == Scenario(id="five", input=5)
    for group in groups:
        (group_id,) = {t.group_id for t in group.trajectories}
        assert group_id is not None
        stored = await model.api.trajectories(group_id=group_id)
        assert sorted(t.id for t in stored) == sorted(t.id for t in group.trajectories)


async def test_a_failed_rollout_is_reported_and_is_no_zero_reward(server: ClientServer) -> None:
    model = await server.model()

    async def rollout(scenario: Scenario) -> Any:
        async with model.trajectory(scenario) as t:
            if scenario.input == "bad":
                raise LookupError("the mail box is gone")
            t.reward = 1.0
        return t

    good, bad = await quick(rollout, ["good", "bad"], max_failures=0.5)
    assert (len(good.trajectories), good.failures) == (2, ())
    assert bad.trajectories == ()
    assert bad.failures == ("LookupError: the mail box is gone",) * 2


async def test_infrastructure_errors_are_tried_again_in_a_new_trajectory_and_others_are_not(server: ClientServer) -> None:
    model = await server.model()
    tries: dict[str, list[str]] = {"engine": [], "user": []}

    async def rollout(scenario: Scenario) -> Any:
        kind = str(scenario.input)
        async with model.trajectory(scenario) as t:
            tries[kind].append(t.id)
            if len(tries[kind]) < 3:
                raise EngineError("out of memory") if kind == "engine" else ValueError("wrong")
            t.reward = 1.0
        return t

    engine, user = await quick(rollout, ["engine", "user"], size=1, retries=2)
    assert len(set(tries["engine"])) == 3
    assert engine.trajectories[0].id == tries["engine"][2]
    assert (await model.fetch(tries["engine"][0])).error == f"{INTERRUPTED}out of memory"
    assert (len(tries["user"]), user.failures) == (1, ("ValueError: wrong",))


async def test_what_the_openai_client_says_of_a_lost_server_counts_as_infrastructure(server: ClientServer) -> None:
    model = await server.model()
    client = model.openai_client(max_retries=0)
    server.faults.add("POST", "/v1/chat/completions", "refuse_503", times=1)
    server.faults.add("POST", "/v1/chat/completions", "lose_answer", times=1)

    async def rollout(scenario: Scenario) -> Any:
        async with model.trajectory(scenario) as t:
            await client.chat.completions.create(model=model.inference_name, messages=[{"role": "user", "content": "hi"}])
            t.reward = 1.0
        return t

    (group,) = await quick(rollout, ["x"], size=1, retries=2)
    assert len(group.trajectories) == 1
    assert not server.faults.planned


async def test_a_run_of_failures_ends_with_the_first_cause_and_cancels_the_rest(server: ClientServer) -> None:
    model = await server.model()
    cancelled: list[str] = []
    first = RuntimeError("the first")
    two_wait = asyncio.Event()

    async def rollout(scenario: Scenario) -> Any:
        async with model.trajectory(scenario) as t:
            if scenario.input == "wait":
                try:
                    if len(waiting) < 2:
                        waiting.append(t.id)
                    if len(waiting) == 2:
                        two_wait.set()
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    cancelled.append(t.id)
                    raise
            await two_wait.wait()
            raise first if not failed else RuntimeError("a later one")

    waiting: list[str] = []
    failed: list[int] = []
    with pytest.raises(RunAborted, match=r"2 of 4 rollouts failed .1 were allowed.*the first") as caught:
        await quick(rollout, ["wait", "fail"], max_failures=1)
    assert caught.value.__cause__ is first
    assert sorted(cancelled) == sorted(waiting)
    assert (await model.fetch(waiting[0])).status is TrajectoryStatus.failed


async def test_sixteen_failures_without_a_success_are_enough(server: ClientServer) -> None:
    count = 0

    async def rollout(scenario: Scenario) -> Any:
        nonlocal count
        count += 1
        raise RuntimeError("never works")

    with pytest.raises(RunAborted):
        await quick(rollout, list(range(50)), max_failures=0.9, concurrency=1)
    assert count == 16
    groups = await quick(rollout, list(range(20)), max_failures=1.0, concurrency=4)
    assert sum(len(group.failures) for group in groups) == 40


async def test_a_deadline_is_a_failure_of_that_rollout_alone_and_is_not_tried_again(server: ClientServer) -> None:
    model = await server.model()
    tries: list[str] = []

    async def rollout(scenario: Scenario) -> Any:
        async with model.trajectory(scenario) as t:
            if scenario.input == "slow":
                tries.append(t.id)
                await asyncio.Event().wait()
            t.reward = 1.0
        return t

    slow, fast = await quick(rollout, ["slow", "fast"], size=1, deadline=1.0, max_failures=1)
    assert slow.failures == ("a rollout did not end within its deadline of 1 s",)
    assert len(fast.trajectories) == 1
    (only,) = tries
    assert (await model.fetch(only)).error == "the rollout was stopped at its deadline of 1 s"


async def test_a_time_out_of_the_users_own_is_an_ordinary_failure(server: ClientServer) -> None:
    async def rollout(scenario: Scenario) -> Any:
        async with asyncio.timeout(0.001):
            await asyncio.Event().wait()

    (group,) = await quick(rollout, ["x"], size=1, max_failures=1, deadline=60.0)
    assert group.failures == ("TimeoutError: no message",)


async def test_cancelling_gather_cancels_every_rollout_and_counts_none_as_failed(server: ClientServer) -> None:
    model = await server.model()
    started = asyncio.Event()
    ids: list[str] = []

    class Failures(Silent):
        def __init__(self) -> None:
            self.count = 0

        def failed(self, reason: str) -> None:
            self.count += 1

    async def rollout(scenario: Scenario) -> Any:
        async with model.trajectory(scenario) as t:
            ids.append(t.id)
            if len(ids) == 4:
                started.set()
            await asyncio.Event().wait()

    shown = Failures()
    task = asyncio.create_task(gather(rollout, [1, 2], group_size=2, progress=shown))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert shown.count == 0
    assert {(await model.fetch(id_)).status for id_ in ids} == {TrajectoryStatus.failed}


async def test_no_more_rollouts_than_the_limit_run_at_once() -> None:
    running = most = 0

    async def rollout(scenario: Scenario) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return Trajectory(policy="a/b", status=TrajectoryStatus.finished)

    await quick(rollout, list(range(20)), size=5, concurrency=7)
    assert most == 7


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        (None, "the rollout returned NoneType; it must return the trajectory it made"),
        (1.0, "the rollout returned float"),
        (Trajectory(policy="a/b"), "while it is open"),
        (Trajectory(policy="a/b", status=TrajectoryStatus.failed, error="oh"), "failed: oh"),
    ],
)
async def test_a_rollout_that_returns_no_finished_trajectory_fails_with_a_sentence(returned: Any, sentence: str) -> None:
    async def rollout(scenario: Scenario) -> Any:
        return returned

    (group,) = await quick(rollout, ["x"], size=1, max_failures=1)
    assert sentence in group.failures[0]


async def test_a_scope_that_the_rollout_never_left_is_failed(server: ClientServer) -> None:
    model = await server.model()
    ids: list[str] = []

    async def rollout(scenario: Scenario) -> Any:
        scope = await model.trajectory(scenario).__aenter__()
        ids.append(scope.id)
        raise ValueError("forgot to leave")

    await quick(rollout, ["x"], size=1, max_failures=1)
    stored = await model.fetch(ids[0])
    assert (stored.status, stored.error) == (TrajectoryStatus.failed, "ValueError: forgot to leave")


async def test_a_reward_set_after_the_block_reaches_the_ledger(server: ClientServer) -> None:
    model = await server.model()

    async def rollout(scenario: Scenario) -> Any:
        async with model.trajectory(scenario) as t:
            pass
        t.reward = 0.75
        return t

    (group,) = await quick(rollout, ["x"], size=1)
    assert group.trajectories[0].reward == 0.75
    assert (await model.fetch(group.trajectories[0])).reward == 0.75


@pytest.mark.slow
async def test_two_thousand_rollouts_do_not_exhaust_sockets(server: ClientServer) -> None:
    model = await server.model()
    server.faults.most_open = 0

    async def rollout(scenario: Scenario) -> Any:
        async with model.trajectory(scenario) as t:
            t.reward = 1.0
        return t

    groups = await gather(rollout, range(250), group_size=8, concurrency=2000, progress=False)
    assert sum(len(group.trajectories) for group in groups) == 2000
    assert server.faults.most_open <= 256


async def test_bad_settings_are_refused() -> None:
    async def rollout(scenario: Scenario) -> Any:
        return None

    for wrong in ({"group_size": 0}, {"concurrency": 0}, {"deadline": 0.0}, {"retries": -1}, {"max_failures": 1.5}, {"max_failures": -1}):
        with pytest.raises(InvalidRequest):
            await gather(rollout, ["x"], progress=False, **wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="no scenario was given"):
        await gather(rollout, [], progress=False)
    with pytest.raises(InvalidRequest, match="scenario 1 must be a Scenario or a JSON value, got object"):
        await gather(rollout, ["x", object()], progress=False)


async def test_groups_of_coroutines_are_gathered_as_in_art() -> None:
    async def rollout(model: str, scenario: int) -> Any:
        if scenario == 2:
            raise ValueError("two")
        return Trajectory(policy=model, status=TrajectoryStatus.finished, reward=float(scenario))

    groups = await gather_trajectory_groups(
        ([rollout("a/b", scenario) for _ in range(2)] for scenario in (1, 2)), max_exceptions=2, progress=False
    )
    assert [[t.reward for t in group.trajectories] for group in groups] == [[1.0, 1.0], []]
    with pytest.raises(RunAborted):
        await gather_trajectory_groups([[rollout("a/b", 2), rollout("a/b", 1)]], progress=False, concurrency=1)


def test_the_same_input_has_the_same_scenario_id_in_every_process() -> None:
    one, two, other = as_scenarios([{"b": 1, "a": "ä"}, {"b": 1, "a": "ä"}, "text"])
    assert one.id == two.id == "scn-" + one.id.removeprefix("scn-")
    assert one.id != other.id


def test_a_share_of_failures_is_counted_on_all_rollouts() -> None:
    assert FailureBudget(0.25, 8).allowed == 2
    assert FailureBudget(0.1, 30).allowed == 3
    assert FailureBudget(3, 8).allowed == 3
    assert not FailureBudget(2, 8).exhausted(2, 0)
    assert FailureBudget(2, 8).exhausted(3, 5)
    assert not FailureBudget(1.0, 100).exhausted(100, 0)


# Evaluation


async def test_an_evaluation_averages_repeats_per_scenario_and_counts_failures(server: ClientServer) -> None:
    model: TrainableModel = await server.model()
    count: dict[str, int] = {}

    async def rollout(scenario: Scenario) -> Any:
        number = count[scenario.id] = count.get(scenario.id, 0) + 1
        async with model.trajectory(scenario) as t:
            if scenario.input == 0 and number == 1:
                raise ValueError("once")
            t.reward = float(number % 2)
            t.metrics["length"] = 10.0
        return t

    found = await model.evaluate(rollout, [0, 1, 2], repeats=2, progress=False)
    assert (found.n, found.failures, found.method) == (3, 1, "bootstrap")
    assert sorted(found.values.values()) == [0.0, 0.5, 0.5]
    assert found.mean == pytest.approx(1 / 3)
    assert found.ci95[0] <= found.mean <= found.ci95[1]
    assert found.metrics == {"length": 10.0}
    stored = await model.fetch(next(iter(found.trajectories.values())))
    assert stored.metadata["purpose"] == "evaluation"


async def test_a_reward_function_may_be_sync_or_async_but_must_keep_the_trajectories(server: ClientServer) -> None:
    model = await server.model()

    async def rollout(scenario: Scenario) -> Any:
        async with model.trajectory(scenario) as t:
            pass
        return t

    def half(groups: list[TrajectoryGroup]) -> list[TrajectoryGroup]:
        return [group.model_copy(update={"trajectories": tuple(t.with_reward(0.5) for t in group.trajectories)}) for group in groups]

    async def half_later(groups: list[TrajectoryGroup]) -> list[TrajectoryGroup]:
        return half(groups)

    for reward in (half, half_later):
        assert (await model.evaluate(rollout, ["x"], reward=reward, progress=False)).mean == 0.5
    with pytest.raises(RolloutError, match="same groups with the same trajectories"):
        await model.evaluate(rollout, ["x"], reward=lambda groups: groups[1:], progress=False)
    with pytest.raises(RolloutError, match="needs a reward for every rollout"):
        await model.evaluate(rollout, ["x"], progress=False)


def test_the_bootstrap_interval_agrees_with_the_normal_one_on_many_values_and_repeats_itself() -> None:
    generator = random.Random(5)
    values = [generator.gauss(2.0, 1.0) for _ in range(400)]
    state = random.getstate()
    low, high, method = interval(values, seed=3)
    assert random.getstate() == state
    half = 1.96 * statistics.stdev(values) / 20
    assert method == "bootstrap"
    assert low == pytest.approx(statistics.fmean(values) - half, abs=0.02)
    assert high == pytest.approx(statistics.fmean(values) + half, abs=0.02)
    assert interval(values, seed=3) == (low, high, method)
    assert interval(values, seed=4) != (low, high, method)


def test_equal_successes_and_failures_get_a_wilson_interval() -> None:
    # Worked example: n = 10, no success, z = 1.96: upper end z²/(n + z²).
    low, high, method = interval([0.0] * 10)
    assert (low, method) == (0.0, "wilson")
    assert high == pytest.approx(1.959963984540054**2 / (10 + 1.959963984540054**2))
    assert interval([1.0] * 10)[:2] == (pytest.approx(1 - high), 1.0)
    # Newcombe 1998, table I: 81 of 263, Wilson: 0.2553 to 0.3662; 15 of 148: 0.0624 to 0.1605; 1 of 29: 0.0061 to 0.1718.
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(15, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)
    assert wilson(1, 29) == pytest.approx((0.0061, 0.1718), abs=5e-5)


def test_equal_values_that_are_no_shares_say_that_nothing_is_known() -> None:
    assert interval([0.3, 0.3]) == (0.3, 0.3, "single_value")
    equal, spread = evaluation([0.3, 0.3]), evaluation([0.8, 0.9])
    assert str(equal) == "0.300 [interval unknown] (n=2)"
    assert str(spread).startswith("0.850 [0.8")
    assert "is not known" in verdict(equal, spread)
    assert "is not known" in verdict(spread, equal)
    assert verdict(evaluation([0.0] * 9), spread) == "The 95 % intervals do not overlap."
    assert verdict(spread, evaluation([1.0])) == "The 95 % intervals overlap."


def evaluation(values: list[float]) -> Evaluation:
    low, high, method = interval(values)
    mean = sum(values) / len(values)
    return Evaluation(
        policy="test/agent", mean=mean, ci95=(low, high), method=method, n=len(values), failures=0, values={}, metrics={}, trajectories={}
    )


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=12))
def test_an_interval_lies_within_the_values_and_around_them(values: list[float]) -> None:
    low, high, method = interval(values)
    assert low <= high
    if method == "bootstrap":
        assert min(values) - 1e-9 <= low
        assert high <= max(values) + 1e-9


def test_an_evaluation_in_which_everything_failed_has_no_mean() -> None:
    with pytest.raises(RolloutError, match="all 2 rollouts failed"):
        summarise([TrajectoryGroup(trajectories=(), failures=("a", "b"))], policy="a/b")


# Progress


def test_plain_progress_prints_counts_reward_and_failures() -> None:
    import io

    stream = io.StringIO()
    shown = Plain(stream)
    shown.begin("rollouts", 3)
    shown.advance(0.5)
    shown.advance(1.0)
    shown.failed("x")
    shown.end()
    assert stream.getvalue().splitlines() == ["rollouts 0/3", "rollouts 3/3 · reward 0.750 · 1 failed"]


def test_a_sparkline_spans_its_own_range() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([float("nan")]) == ""


@pytest.mark.parametrize(
    ("path", "fault"),
    [("/api/trajectories", "lose_answer"), (r"/api/trajectories/[^/]+/fail", "refuse_503"), ("/api/trajectories", "refuse_503")],
)
async def test_no_trajectory_stays_open_because_the_server_did_not_answer_for_a_while(
    server: ClientServer, path: str, fault: Fault
) -> None:
    """A server that is started again within a step: the attempts that it did not hear the end of are failed in the end."""
    model = await server.model()
    server.faults.add("POST", path, fault, QUICK.attempts)
    attempts = 0

    async def rollout(scenario: Scenario) -> Any:
        nonlocal attempts
        attempts += 1
        async with model.trajectory(scenario) as t:
            if attempts == 1:
                raise ServerUnavailable("gone for a while")
            t.reward = 1.0
        return t

    (group,) = await quick(rollout, ["x"], size=1)
    assert [t.reward for t in group.trajectories] == [1.0]
    stored = await model.api.trajectories(policy=model.policy)
    ended = [trajectory.status for trajectory in stored]
    assert ended[-1] is TrajectoryStatus.finished
    assert set(ended[:-1]) <= {TrajectoryStatus.failed}
    assert len(ended) == (1 if (path, fault) == ("/api/trajectories", "refuse_503") else 2)
    assert all((trajectory.error or INTERRUPTED).startswith(INTERRUPTED) for trajectory in stored)


async def test_a_rollout_that_is_cancelled_while_its_trajectory_is_opened_or_finished_leaves_none_open(server: ClientServer) -> None:
    model = await server.model()

    async def rollout() -> None:
        async with model.trajectory():
            pass

    whole = time.perf_counter()
    await rollout()
    whole = time.perf_counter() - whole
    for part in range(40):
        task = asyncio.create_task(rollout())
        await asyncio.sleep(whole * part / 30)
        task.cancel()
        await asyncio.wait([task])
    assert await model.api.trajectories(policy=model.policy, status=TrajectoryStatus.open) == []


def test_no_time_left_is_told_before_a_tenth_is_done() -> None:
    """Rollouts run side by side: the first one's duration, times all, is no estimate."""
    counts = Plain(io.StringIO())
    counts.begin("rollouts", 40)
    counts.started -= 10
    counts.advance(1.0)
    assert counts.remaining() == ""
    for _ in range(9):
        counts.advance(1.0)
    assert counts.remaining() == "0:30 left"
