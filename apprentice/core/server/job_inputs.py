"""What a train job is given: checked before it is accepted, loaded when it runs. Ledger and codec only; no weights."""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import ForeignTrajectory, InvalidRequest, TrajectoryStateError
from ..records import Trajectory, TrajectoryStatus
from ..training.forest import TokenSample
from ..wire import Demonstration, GrpoJob, RewardedTrajectory, SftJob
from .chat import ChatCodec
from .chat_messages import read_messages, read_tools
from .job_batch import supervised_samples
from .ledger import Ledger


def check_request(ledger: Ledger, request: GrpoJob | SftJob) -> None:
    """Refuse now what would fail later.

    Raises UnknownModel, UnknownTrajectory, ForeignTrajectory, TrajectoryStateError (open), InvalidRequest (an empty
    group, a trajectory twice, a reward for a call that is not in its trajectory, a demonstration that no model can learn
    from, nothing to train on).
    """
    ledger.policy(request.policy)
    if isinstance(request, SftJob):
        if not request.demonstrations and not request.trajectories:
            raise InvalidRequest("a supervised job needs at least one demonstration or trajectory, got none", param="demonstrations")
        for number, demonstration in enumerate(request.demonstrations):
            _check_demonstration(demonstration, f"demonstrations[{number}]")
        _check_unique(request.trajectories)
        for trajectory_id in request.trajectories:
            _check_trainable(ledger.trajectory(trajectory_id, tokens=False), request.policy)
        return
    for number, group in enumerate(request.groups):
        if not group:
            raise InvalidRequest(f"group {number} is empty; each group needs its trajectories", param=f"groups.{number}")
    members = [item for group in request.groups for item in group]
    _check_unique(item.id for item in members)
    for item in members:
        _check_trainable(ledger.trajectory(item.id, tokens=False), request.policy)
        _check_completion_rewards(ledger, item)


def load_groups(ledger: Ledger, request: GrpoJob) -> list[list[Trajectory]]:
    """The trajectories of a job with their completions, and with the rewards that the request gives them."""
    return [[_rewarded(ledger.trajectory(item.id), item) for item in group] for group in request.groups]


def load_targets(ledger: Ledger, codec: ChatCodec, request: SftJob) -> list[list[TokenSample]]:
    """One list of targets for each demonstration and each trajectory; all tokens weigh one.

    Raises InvalidRequest for a demonstration that this model's chat template cannot render.
    """
    targets: list[list[TokenSample]] = []
    for number, demonstration in enumerate(request.demonstrations):
        try:
            turns = codec.demonstration(demonstration.messages, demonstration.tools)
        except InvalidRequest as error:
            raise InvalidRequest(f"demonstrations[{number}]: {error.message}", param=f"demonstrations[{number}]") from error
        targets.append([_target(f"demonstration-{number}-{turn}", prompt, reply) for turn, (prompt, reply) in enumerate(turns)])
    return targets + [supervised_samples(ledger.trajectory(trajectory_id)) for trajectory_id in request.trajectories]


def _target(name: str, prompt_ids: list[int], token_ids: list[int]) -> TokenSample:
    zeros = (0.0,) * len(token_ids)
    return TokenSample(name, tuple(prompt_ids), tuple(token_ids), zeros, zeros, (1.0,) * len(token_ids))


def _rewarded(trajectory: Trajectory, item: RewardedTrajectory) -> Trajectory:
    reward = trajectory.reward if item.reward is None else item.reward
    return trajectory.model_copy(
        update={"reward": reward, "completion_rewards": {**trajectory.completion_rewards, **item.completion_rewards}}
    )


def _check_unique(ids: Iterable[str]) -> None:
    seen: set[str] = set()
    for trajectory_id in ids:
        if trajectory_id in seen:
            raise InvalidRequest(f"trajectory {trajectory_id} stands twice in the job; each may be trained once", param="groups")
        seen.add(trajectory_id)


def _check_trainable(trajectory: Trajectory, policy: str) -> None:
    if trajectory.policy != policy:
        raise ForeignTrajectory(f"trajectory {trajectory.id} belongs to {trajectory.policy}, not to {policy}", param="groups")
    if trajectory.status is TrajectoryStatus.open:
        raise TrajectoryStateError(f"trajectory {trajectory.id} is still open; finish it or fail it before training on it", param="groups")


def _check_demonstration(demonstration: Demonstration, where: str) -> None:
    """All that can be told without the model's chat template."""
    messages = read_messages(demonstration.messages, f"{where}.messages")
    read_tools(demonstration.tools, f"{where}.tools")
    learned = 0
    for index, (read, given) in enumerate(zip(messages, demonstration.messages, strict=True)):
        at = f"{where}.messages[{index}]"
        if read["role"] == "assistant" and index == 0:
            raise InvalidRequest(f"{at} is an assistant message; a demonstration begins with what the assistant answers", param=at)
        if not isinstance(train := given.get("train"), bool | None):
            raise InvalidRequest(f"{at}.train must be true or false, got {type(train).__name__}", param=f"{at}.train")
        learned += read["role"] == "assistant" and train is not False
    if learned == 0:
        raise InvalidRequest(f"{where} has no assistant message to learn", param=where)


def _check_completion_rewards(ledger: Ledger, item: RewardedTrajectory) -> None:
    if item.completion_rewards:
        known = {completion.id for completion in ledger.completions(item.id)}
        for completion_id in item.completion_rewards:
            if completion_id not in known:
                raise InvalidRequest(
                    f"completion {completion_id} is not in trajectory {item.id}, so it cannot be rewarded there", param="groups"
                )
