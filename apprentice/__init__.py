"""Apprentice trains the LLM agents you already have, on the job. The public names; each is loaded when it is first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .core.client.backends import Backend, LocalBackend, RemoteBackend
    from .core.client.evaluate import Evaluation
    from .core.client.gather import gather, gather_trajectory_groups
    from .core.client.loop import LoopResult, TrainingLoop
    from .core.client.model import TrainableModel
    from .core.client.run_state import Budget, EarlyStop
    from .core.client.scope import TrajectoryScope, current_trajectory
    from .core.config import AdapterConfig, CheckpointPolicy, SftConfig, TrainConfig
    from .core.errors import ApprenticeError, InfrastructureError, RolloutError, RunAborted, UserInputError
    from .core.records import Completion, Fate, Scenario, TrainResult, TrainStatus, Trajectory, TrajectoryGroup
    from .core.wire import Demonstration

_HOMES = {
    "client.backends": ("Backend", "LocalBackend", "RemoteBackend"),
    "client.evaluate": ("Evaluation",),
    "client.gather": ("gather", "gather_trajectory_groups"),
    "client.loop": ("LoopResult", "TrainingLoop"),
    "client.model": ("TrainableModel",),
    "client.run_state": ("Budget", "EarlyStop"),
    "client.scope": ("TrajectoryScope", "current_trajectory"),
    "config": ("AdapterConfig", "CheckpointPolicy", "SftConfig", "TrainConfig"),
    "errors": ("ApprenticeError", "InfrastructureError", "RolloutError", "RunAborted", "UserInputError"),
    "records": ("Completion", "Fate", "Scenario", "TrainResult", "TrainStatus", "Trajectory", "TrajectoryGroup"),
    "wire": ("Demonstration",),
}
_MODULE_OF = {name: f"apprentice.core.{module}" for module, names in _HOMES.items() for name in names}

__all__ = [
    "AdapterConfig",
    "ApprenticeError",
    "Backend",
    "Budget",
    "CheckpointPolicy",
    "Completion",
    "Demonstration",
    "EarlyStop",
    "Evaluation",
    "Fate",
    "InfrastructureError",
    "LocalBackend",
    "LoopResult",
    "RemoteBackend",
    "RolloutError",
    "RunAborted",
    "Scenario",
    "SftConfig",
    "TrainConfig",
    "TrainResult",
    "TrainStatus",
    "TrainableModel",
    "TrainingLoop",
    "Trajectory",
    "TrajectoryGroup",
    "TrajectoryScope",
    "UserInputError",
    "current_trajectory",
    "gather",
    "gather_trajectory_groups",
]


def __getattr__(name: str) -> object:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'apprentice' has no attribute {name!r}")
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
