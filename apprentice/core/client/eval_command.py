"""What `apprentice eval` does: a rollout function from a module, scenarios from a file, one evaluation. Also for scripts."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..errors import ConfigError, InvalidRequest
from ..records import Scenario
from .backends import Backend, LocalBackend, RemoteBackend
from .evaluate import Evaluation
from .gather import Returned
from .model import TrainableModel


async def run_evaluation(
    policy: str, rollout: str, scenarios: Path, *, url: str | None, home: Path, repeats: int = 1, concurrency: int = 32
) -> Evaluation:
    """Evaluate `policy` (`project/name`, or `…@step`) with `rollout` (`module:function`, called as `function(model, scenario)`).

    Raises ConfigError or InvalidRequest for a function or a file that cannot be used, UnknownModel, and what rollouts raise.
    """
    function, tasks = load_function(rollout), read_scenarios(scenarios)
    backend: Backend = RemoteBackend(url) if url else LocalBackend(home)
    try:
        model = await TrainableModel.attach(backend, policy)

        async def one(scenario: Scenario) -> Returned:
            return await function(model, scenario)

        return await model.evaluate(one, tasks, repeats=repeats, concurrency=concurrency)
    finally:
        await backend.close()


def load_function(name: str) -> Callable[..., Any]:
    """The function that `module:function` names; modules of the working folder are found. Raises ConfigError."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"a function is named module:function, got '{name}'", param="rollout")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"module '{module_name}' of '{name}' cannot be imported: {error}", param="rollout") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ConfigError(f"module '{module_name}' has no function '{attribute}'", param="rollout")
    return function


def read_scenarios(path: Path) -> list[Scenario]:
    """One scenario a line: an object with `input` (and `id`, `metadata`), or any other JSON value as the input itself."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the scenario file {path} cannot be read: {error}", param="scenarios") from error
    found: list[Scenario] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            found.append(Scenario.model_validate(value if isinstance(value, dict) and "input" in value else {"input": value}))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise InvalidRequest(f"{path} line {number}: {where}: {first['msg']}", param="scenarios") from error
        except ValueError as error:
            raise InvalidRequest(f"{path} line {number} is not JSON: {error}", param="scenarios") from error
    if not found:
        raise InvalidRequest(f"{path} has no scenario", param="scenarios")
    return found
