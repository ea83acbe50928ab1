"""The trained state of a policy between memory and a checkpoint's folder. Files and weights only; no engine, no ledger."""

from __future__ import annotations

from pathlib import Path

from ..training.checkpoints import Checkpoint
from ..training.policy import HostedModel
from ..training.trainer import Trainer
from ..wire import RegisterModel


def write_policy(host: HostedModel, trainer: Trainer, alias: str, folder: Path) -> None:
    """The full state: `adapter/` in plain PEFT format, `trainer/` with optimizer moments and generators."""
    host.save_adapter(alias, folder / "adapter")
    (folder / "trainer").mkdir()
    trainer.save_state(folder / "trainer")


def fresh_trainer(host: HostedModel, alias: str, body: RegisterModel, source: Path | None) -> Trainer:
    """A new adapter drawn from the seed, or a copy of the adapter in `source`."""
    drop_trainer(host, alias)
    if source is None:
        host.add_adapter(alias, body.adapter, body.seed)
    else:
        host.load_adapter(alias, source, trainable=True)
    return Trainer(host, alias, body.seed)


def restored_trainer(host: HostedModel, alias: str, seed: int, checkpoint: Checkpoint) -> Trainer:
    """The trainer as it was when the checkpoint was written. Raises CheckpointCorrupt."""
    drop_trainer(host, alias)
    host.load_adapter(alias, checkpoint.adapter, trainable=True)
    trainer = Trainer(host, alias, seed)
    trainer.load_state(checkpoint.trainer)
    return trainer


def copy_into_trainer(host: HostedModel, trainer: Trainer, alias: str, checkpoint: Checkpoint) -> None:
    """Give a trainer in memory the checkpoint's state, in place: the adapter exists all the time. Raises CheckpointCorrupt."""
    name = f"{alias}#revert"
    with host.lock:
        host.load_adapter(name, checkpoint.adapter)
        try:
            trainer.load_state(checkpoint.trainer)
            stored = host.adapter_parameters(name)
            for key, parameter in host.adapter_parameters(alias).items():
                parameter.data.copy_(stored[key].data)
        finally:
            host.drop_adapter(name)


def drop_trainer(host: HostedModel, alias: str) -> None:
    """Forget the training adapter, if there is one."""
    if alias in host.adapters():
        host.drop_adapter(alias)
