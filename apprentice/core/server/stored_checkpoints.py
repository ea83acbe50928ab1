"""The published checkpoints as the control API and the command line show and change them. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import Conflict
from ..training.checkpoints import Checkpoint, CheckpointStore
from ..wire import CheckpointInfo
from .ledger import Ledger


class StoredCheckpoints:
    """The published checkpoints, for the control API. The folders are the truth; the ledger mirrors them."""

    def __init__(self, store: CheckpointStore, ledger: Ledger) -> None:
        self._store = store
        self._ledger = ledger

    def list(self, policy: str | None) -> Sequence[CheckpointInfo]:
        """By policy and step. Raises UnknownModel."""
        if policy is not None:
            self._ledger.policy(policy)
            names = [policy]
        else:
            names = [f"{body.project}/{body.name}" for body in self._ledger.policies()]
        found = {name: self._store.list(name) for name in names}
        return [checkpoint_info(c, latest=c.step == checkpoints[-1].step) for checkpoints in found.values() for c in checkpoints]

    def get(self, policy: str, step: int) -> CheckpointInfo:
        return checkpoint_info(self._store.get(policy, step), latest=self._is_latest(policy, step))

    def pin(self, policy: str, step: int, pinned: bool) -> CheckpointInfo:
        checkpoint = self._store.pin(policy, step, pinned)
        self._ledger.mark_checkpoint(policy, step, pinned=pinned)
        return checkpoint_info(checkpoint, latest=self._is_latest(policy, step))

    def delete(self, policy: str, step: int) -> None:
        checkpoint = self._store.get(policy, step)
        if checkpoint.pinned:
            raise Conflict(f"checkpoint {policy}@{step} is pinned; unpin it before deleting it", param="step")
        if self._is_latest(policy, step):
            raise Conflict(
                f"checkpoint {policy}@{step} is the latest of its policy, which is served from it; it cannot be deleted", param="step"
            )
        self._store.delete(policy, step)
        self._ledger.mark_checkpoint(policy, step, deleted=True)

    def _is_latest(self, policy: str, step: int) -> bool:
        latest = self._store.latest(policy)
        return latest is not None and latest.step == step


def checkpoint_info(checkpoint: Checkpoint, *, latest: bool) -> CheckpointInfo:
    return CheckpointInfo(
        policy=checkpoint.policy,
        step=checkpoint.step,
        path=str(checkpoint.adapter),
        created_at=checkpoint.state.created_at,
        metrics=checkpoint.state.metrics,
        pinned=checkpoint.pinned,
        latest=latest,
    )
