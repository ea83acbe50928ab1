"""The one training loop: scenarios → rollouts → reward → train → evaluate → keep, until a budget is spent or the goal is met.

Every arrow ends with the state on disk (`run_state`). After a kill at any point, running the same loop again goes on
as if nothing had happened: rollouts that were finished are found in the ledger and used, those left open are failed and
made anew, a train job that was submitted is waited for and not submitted again unless it failed, and no row of metrics is doubled.

Rewards come in as a callable; the loop knows no judge, no agent framework and no trainer.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from ..config import SftConfig, TrainConfig
from ..errors import ConfigError, InvalidRequest, TrainJobFailed, UnknownCheckpoint
from ..records import JsonObject, Record, Scenario, TrainResult, Trajectory, TrajectoryGroup, new_id
from ..tracking.local import JsonlMetrics
from ..tracking.metrics import TOKENS_TRAINED
from ..wire import Demonstration, GrpoJob, RewardUpdate
from .curriculum import DIFFICULTY, Curriculum, drawn, drawn_by_weight
from .evaluate import EVALUATION, RewardFunction, apply_reward, summarise
from .gather import GatherSettings, GroupPlan, Member, Rollout, run_plans
from .model import TrainableModel, rewarded
from .progress import Progress, progress_of
from .resume import restore
from .run_report import write_run_report
from .run_state import Budget, EarlyStop, EvaluationPoint, RunState, exclusive, fingerprint
from .values import as_scenarios

Observer: TypeAlias = Callable[[str, RunState], None]
"""Called at every arrow, twice: with `<phase>` when its work is done, and with `<phase>:saved` when its state is on disk."""


class LoopResult(Record):
    """How a run ended."""

    run_id: str
    policy: str
    steps: int
    policy_step: int
    stopped: str
    """Why it ended, as a sentence."""
    evaluations: tuple[EvaluationPoint, ...]
    best_step: int | None
    """Policy step with the best evaluation; its checkpoint is pinned."""
    report: Path

    @property
    def adapter_step(self) -> int | None:
        """The policy step whose adapter is worth taking: that of the best evaluation, else the last one; None if nothing was trained."""
        return self.best_step or self.policy_step or None


class TrainingLoop:
    """Trains `model` on `scenarios` with `rollout`.

    `reward`: callable on the groups of a step (sync or async), or None where rollouts set `t.reward`. `eval_scenarios`:
    held out, evaluated before, after the warm-up, every `eval_every` steps and at the end. `warmup`: demonstrations
    for a supervised start. `run_dir`: state, metrics.jsonl, report.html and report.json; the same folder resumes.
    `curriculum`: what decides which scenarios come next; None: all in turn.
    `seed` decides the order of scenarios; changing `groups_per_step` between resumes neither skips nor repeats any.
    """

    def __init__(
        self,
        model: TrainableModel,
        rollout: Rollout,
        scenarios: Iterable[Scenario | object],
        *,
        budget: Budget,
        run_dir: str | Path,
        reward: RewardFunction | None = None,
        eval_scenarios: Iterable[Scenario | object] = (),
        eval_reward: RewardFunction | None = None,
        eval_every: int = 5,
        eval_repeats: int = 1,
        group_size: int = 8,
        groups_per_step: int = 4,
        early_stop: EarlyStop | None = None,
        config: TrainConfig | None = None,
        warmup: Sequence[Demonstration | Mapping[str, Any]] = (),
        warmup_config: SftConfig | None = None,
        curriculum: Curriculum | None = None,
        seed: int = 0,
        concurrency: int = 32,
        deadline: float | None = 600.0,
        max_failures: int | float = 0.5,
        retries: int = 3,
        progress: bool | Progress = True,
        observer: Observer | None = None,
    ) -> None:
        self.model = model
        self.rollout = rollout
        self.scenarios = as_scenarios(scenarios)
        self.eval_scenarios = as_scenarios(eval_scenarios)
        self.budget = budget
        self.run_dir = Path(run_dir)
        self.reward = reward
        self.eval_reward = eval_reward or reward
        self.eval_every, self.eval_repeats = eval_every, eval_repeats
        self.group_size, self.groups_per_step = group_size, groups_per_step
        self.early_stop = early_stop or EarlyStop()
        self.config = config or TrainConfig()
        self.warmup, self.warmup_config = tuple(warmup), warmup_config
        self.curriculum = curriculum
        self.seed = seed
        self.settings = GatherSettings(concurrency, deadline, max_failures, retries)
        self._wanted_progress = progress
        self._observer = observer
        self._look_back = False
        self._check()

    def _check(self) -> None:
        if not self.scenarios:
            raise InvalidRequest("a training loop needs at least one scenario", param="scenarios")
        if self.budget == Budget():
            raise ConfigError("a training loop needs a budget: Budget(steps=…), Budget(seconds=…) or Budget(tokens=…)", param="budget")
        for name in ("eval_every", "eval_repeats", "group_size", "groups_per_step"):
            if getattr(self, name) < 1:
                raise InvalidRequest(f"{name} must be at least 1, got {getattr(self, name)}", param=name)
        if self.group_size < 2:
            raise InvalidRequest("group_size must be at least 2: rollouts are compared with each other", param="group_size")

    async def run(self) -> LoopResult:
        """Run to the end, from the start or from where the last run in `run_dir` was stopped."""
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as cause:
            raise ConfigError(f"the run's folder {str(self.run_dir)!r} cannot be made: {cause}", param="run_dir") from cause
        with exclusive(self.run_dir):
            return await self._run()

    async def _run(self) -> LoopResult:
        state = await self._begin()
        self.metrics = JsonlMetrics(self.run_dir / "metrics.jsonl")
        self.progress = progress_of(self._wanted_progress)
        self.progress.curve([value for _, value in self.metrics.column("rollouts/reward_mean")])
        phases = self._phases()
        while state.phase != "done":
            phase, started = state.phase, time.monotonic()
            reached = await phases[phase](state)
            reached = reached.model_copy(update={"seconds": state.seconds + time.monotonic() - started})
            self._observe(phase, reached)
            reached.save(self.run_dir)
            self._look_back = False
            self._observe(f"{phase}:saved", reached)
            state = reached
        return LoopResult(
            run_id=state.run_id,
            policy=state.policy,
            steps=state.step,
            policy_step=state.policy_step,
            stopped=state.stopped or "",
            evaluations=state.evaluations,
            best_step=state.best_step,
            report=self.run_dir / "report.html",
        )

    def _phases(self) -> dict[str, Callable[[RunState], Awaitable[RunState]]]:
        return {
            "baseline": self._baseline,
            "difficulty": self._difficulty,
            "warmup": self._warmup,
            "warmed": self._warmed,
            "rollouts": self._rollouts,
            "train": self._train,
            "evaluate": self._evaluate,
            "keep": self._keep,
            "final": self._final,
            "report": self._report,
        }

    def _observe(self, what: str, state: RunState) -> None:
        if self._observer is not None:
            self._observer(what, state)

    async def _begin(self) -> RunState:
        """The saved state, if it belongs to this model and data; else a new one. A finished run goes on if its budget grew."""
        state, mark = RunState.load(self.run_dir), fingerprint(self.scenarios)
        step = await self.model.get_step()
        if state is None:
            return RunState(run_id=new_id("run")[:16], policy=self.model.policy, fingerprint=mark, policy_step=step)
        self._look_back = True
        if state.policy != self.model.policy:
            raise ConfigError(f"{self.run_dir} holds a run of {state.policy}, not of {self.model.policy}; choose another run_dir")
        if state.fingerprint != mark:
            raise ConfigError(f"the run in {self.run_dir} was started with other scenarios; choose another run_dir for these")
        if step < state.policy_step:
            raise ConfigError(
                f"the run in {self.run_dir} had brought {state.policy} to step {state.policy_step}, but the server has it at step {step}; "
                "use the server's same home, or another run_dir"
            )
        stopped_by_budget = state.phase == "done" and (state.stopped or "").startswith("the budget")
        if stopped_by_budget and self._spent(state) is None:
            state = state.model_copy(update={"phase": "rollouts", "stopped": None})
        return state

    def _spent(self, state: RunState) -> str | None:
        return self.budget.spent(state.step, state.seconds, state.tokens)

    # The phases. Each does its work and gives the state to save; done twice it does nothing twice.

    async def _baseline(self, state: RunState) -> RunState:
        state = await self._evaluated(state, "before") if self.eval_scenarios else state
        hopeless = bool(state.evaluations) and state.evaluations[-1].evaluation.mean <= 0
        measures = self.curriculum is not None and self.curriculum.attempts > 0 and not hopeless
        return state.model_copy(update={"phase": "difficulty" if measures else "warmup"})

    async def _difficulty(self, state: RunState) -> RunState:
        """The base model's solve rate of every scenario, where it solves any."""
        assert self.curriculum is not None
        plans = self._plans(state, self.scenarios, "d", self.curriculum.attempts, {"purpose": DIFFICULTY})
        groups = await self._gather(plans, "difficulty of the scenarios")
        return state.model_copy(update={"phase": "warmup", "solve_rates": self.curriculum.solve_rates(groups)})

    async def _warmup(self, state: RunState) -> RunState:
        update: dict[str, Any] = {"phase": "warmed", "attempt": 0}
        if self.warmup:
            submit = partial(self.model.train_sft, self.warmup, self.warmup_config, progress=self.progress)
            result = await self._trained(state, "warmup", lambda key: submit(idempotency_key=key))
            update |= {"policy_step": result.step, "tokens": state.tokens + result.metrics.get(TOKENS_TRAINED, 0.0)}
        return state.model_copy(update=update)

    async def _warmed(self, state: RunState) -> RunState:
        state = await self._evaluated(state, "warm-up") if self.warmup and self.eval_scenarios else state
        return self._onward(state)

    def _onward(self, state: RunState) -> RunState:
        """To the next step, or to the end."""
        best = state.evaluations[-1].evaluation.mean if state.evaluations else None
        reason = self._spent(state) or (self.early_stop.reached(best, state.stale) if best is not None else None)
        return state.model_copy(update={"phase": "final" if reason else "rollouts", "stopped": reason})

    async def _rollouts(self, state: RunState) -> RunState:
        """Rollouts and their reward; ends with the train job's body, ready to be sent."""
        started = time.monotonic()
        order = self._next_scenarios(state)
        plans = self._plans(state, [self.scenarios[index] for index in order], f"s{state.step + 1:05d}", self.group_size, {})
        groups = await self._gather(plans, f"step {state.step + 1}: rollouts")
        rolled = time.monotonic()
        self.progress.begin(f"step {state.step + 1}: reward", 0)
        try:
            scored = await apply_reward(self.reward, groups)
            await self._tell_rewards(groups, scored)
        finally:
            self.progress.end()
        row: JsonObject = {**summary(scored), "seconds/rollouts": rolled - started, "seconds/reward": time.monotonic() - rolled}
        job = GrpoJob(policy=self.model.policy, groups=rewarded(scored), config=self.config)
        rates = {**state.solve_rates, **(self.curriculum.solve_rates(scored) if self.curriculum else {})}
        update: dict[str, Any] = {"pending": job, "row": row, "examples": state.examples + len(order), "solve_rates": rates}
        return state.model_copy(update={"phase": "train", **update})

    async def _train(self, state: RunState) -> RunState:
        started = time.monotonic()
        job = state.pending
        assert job is not None
        result = await self._trained(state, str(state.step + 1), lambda key: self.model.run_job(job, key, self.progress))
        row: JsonObject = {
            **state.row,
            **result.metrics,
            "policy_step": result.step,
            "status": result.status.value,
            "seconds/train": time.monotonic() - started,
        }
        tokens = state.tokens + result.metrics.get(TOKENS_TRAINED, 0.0)
        update: dict[str, Any] = {"pending": None, "row": row, "policy_step": result.step, "tokens": tokens, "attempt": 0}
        return state.model_copy(update={"phase": "evaluate", **update})

    async def _evaluate(self, state: RunState) -> RunState:
        if self.eval_scenarios and (state.step + 1) % self.eval_every == 0:
            state = await self._evaluated(state, str(state.step + 1))
            found = state.evaluations[-1].evaluation
            row: JsonObject = {
                **state.row,
                "evaluation/mean": found.mean,
                "evaluation/ci95_low": found.ci95[0],
                "evaluation/ci95_high": found.ci95[1],
                "evaluation/failed": found.failures,
            }
            state = state.model_copy(update={"row": row})
        return state.model_copy(update={"phase": "keep"})

    async def _keep(self, state: RunState) -> RunState:
        """Pin the best checkpoint, write the step's row, and decide whether to go on."""
        state = await self._pinned(state)
        self.metrics.log(state.step + 1, state.row)
        self.progress.curve([value for _, value in self.metrics.column("rollouts/reward_mean")])
        return self._onward(state.model_copy(update={"step": state.step + 1, "row": {}}))

    async def _final(self, state: RunState) -> RunState:
        if self.eval_scenarios and state.evaluations[-1].policy_step != state.policy_step:
            state = await self._evaluated(state, f"{state.step}")
            state = await self._pinned(state)
        return state.model_copy(update={"phase": "report"})

    async def _report(self, state: RunState) -> RunState:
        await write_run_report(self.run_dir, self.model, state, self.metrics, self.eval_scenarios, self.config)
        return state.model_copy(update={"phase": "done"})

    # Their parts

    async def _trained(self, state: RunState, name: str, submit: Callable[[str], Awaitable[TrainResult]]) -> TrainResult:
        """The result of `submit(key)`. A job that failed is told once: the next resume submits it anew, as another attempt."""
        jobs = await self.model.api.jobs() if self._look_back else ()
        earlier, attempt = {job.id for job in jobs if job.state == "failed"}, state.attempt
        while True:
            try:
                return await submit(f"{state.run_id}/{name}" + (f"/{attempt}" if attempt else ""))
            except TrainJobFailed as error:
                attempt += 1
                if error.details.get("job_id") not in earlier:
                    with contextlib.suppress(OSError):  # the disk is full: the next resume meets the failed job and goes past it
                        state.model_copy(update={"attempt": attempt}).save(self.run_dir)
                    raise

    def _next_scenarios(self, state: RunState) -> list[int]:
        if self.curriculum is None:
            return drawn(len(self.scenarios), state.examples, self.groups_per_step, self.seed)
        weights = self.curriculum.weights(self.scenarios, state.solve_rates)
        return drawn_by_weight(weights, state.examples, self.groups_per_step, self.seed)

    def _plans(self, state: RunState, scenarios: Sequence[Scenario], where: str, size: int, metadata: JsonObject) -> list[GroupPlan]:
        plans: list[GroupPlan] = []
        for index, scenario in enumerate(scenarios):
            group_id = f"{state.run_id}-{where}-g{index:03d}"
            members = [Member(prefix=f"{group_id}-m{number:03d}") for number in range(size)]
            plans.append(GroupPlan(scenario, members, group_id, {**metadata}))
        return plans

    async def _gather(self, plans: list[GroupPlan], what: str) -> list[TrajectoryGroup]:
        if self._look_back:
            await restore(self.model.api, plans, rewards_needed=self.reward is None)
        return await run_plans(self.rollout, plans, self.settings, self.progress, what)

    async def _tell_rewards(self, before: list[TrajectoryGroup], after: list[TrajectoryGroup]) -> None:
        """Record in the ledger what the reward function decided, for whoever looks at the trajectories later."""
        old = {trajectory.id: trajectory for group in before for trajectory in group.trajectories}
        async with asyncio.TaskGroup() as tasks:
            for trajectory in (trajectory for group in after for trajectory in group.trajectories):
                if trajectory != old[trajectory.id]:
                    update = RewardUpdate(
                        reward=trajectory.reward, completion_rewards=trajectory.completion_rewards, metrics=trajectory.metrics
                    )
                    tasks.create_task(self.model.api.reward(trajectory.id, update))

    async def _evaluated(self, state: RunState, at: str) -> RunState:
        """The state with one more evaluation, and what it says about the best."""
        metadata: JsonObject = {"purpose": EVALUATION}
        plans = self._plans(state, self.eval_scenarios, f"e-{at}", self.eval_repeats, metadata)
        groups = await self._gather(plans, f"evaluation ({at})")
        scored = await apply_reward(self.eval_reward, groups)
        await self._tell_rewards(groups, scored)
        found = summarise(scored, policy=self.model.policy, seed=self.seed)
        update: dict[str, Any] = {
            "evaluations": (*state.evaluations, EvaluationPoint(at=at, policy_step=state.policy_step, evaluation=found))
        }
        if state.best_mean is None or found.mean > state.best_mean:
            update |= {"best_mean": found.mean, "best_step": state.policy_step, "stale": 0}
        else:
            update["stale"] = state.stale + 1
        return state.model_copy(update=update)

    async def _pinned(self, state: RunState) -> RunState:
        """Pin the checkpoint of the best evaluation instead of the one before. Step 0 is the base model: nothing to pin."""
        if not state.best_step or state.best_step == state.pinned_step:
            return state
        await self.model.pin_checkpoint(state.best_step)
        if state.pinned_step is not None:
            try:
                await self.model.pin_checkpoint(state.pinned_step, pinned=False)
            except UnknownCheckpoint:
                self.progress.note(f"checkpoint {state.pinned_step}, the best before, is gone")
        return state.model_copy(update={"pinned_step": state.best_step})


def summary(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """The row's part that rollouts give (`tracking.metrics`)."""
    trajectories: list[Trajectory] = [trajectory for group in groups for trajectory in group.trajectories]
    rewards = [trajectory.reward for trajectory in trajectories if trajectory.reward is not None]
    row: dict[str, float] = {
        "rollouts/finished": len(trajectories),
        "rollouts/failed": sum(len(group.failures) for group in groups),
    }
    if rewards:
        row |= {"rollouts/reward_mean": statistics.fmean(rewards), "rollouts/reward_std": statistics.pstdev(rewards)}
    numbers: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in trajectory.metrics.items():
            numbers.setdefault(name, []).append(value)
    return {**row, **{f"rollout/{name}": statistics.fmean(found) for name, found in numbers.items()}}
