"""What `apprentice eval` does: a rollout function from a module, scenarios from a file, one evaluation. Also for scripts."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError

from ..errors import ConfigError, InvalidRequest
from ..records import Scenario
from .backends import Backend, LocalBackend, RemoteBackend
from .evaluate import Evaluation
from .gather import Returned
from .model import TrainableModel, parse_policy
from .values import as_scenarios, sentence


async def run_evaluation(
    policy: str, rollout: str, scenarios: Path, *, url: str | None, home: Path, repeats: int = 1, concurrency: int = 32
) -> Evaluation:
    """Evaluate `policy` (`project/name`, or `…@step`) with `rollout` (`module:function`, called as `function(model, scenario)`).

    Without `url` a server is started on `home`, which must exist. Raises ConfigError or InvalidRequest for a name, a
    function or a file that cannot be used, UnknownModel, UnknownCheckpoint, and what rollouts raise.
    """
    parse_policy(policy)
    function, tasks = load_function(rollout), read_scenarios(scenarios)
    if url is None and not (home / "ledger.sqlite").is_file():
        raise ConfigError(f"there is no ledger in {home}; name the home of a server, or the url of one that runs", param="home")
    backend: Backend = RemoteBackend(url) if url else LocalBackend(home)
    try:
        model = await TrainableModel.attach(backend, policy)

        async def one(scenario: Scenario) -> Returned:
            return await function(model, scenario)

        return await model.evaluate(one, tasks, repeats=repeats, concurrency=concurrency)
    finally:
        await backend.close()


def load_function(name: str) -> Callable[..., Any]:
    """The async function that `module:function` names; modules of the working folder are found. Raises ConfigError."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"a function is named module:function, got '{name}'", param="rollout")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the user's module does when it is imported; the cause is kept
        raise ConfigError(f"module '{module_name}' of '{name}' cannot be imported: {sentence(error)}", param="rollout") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ConfigError(f"module '{module_name}' has no function '{attribute}'", param="rollout")
    if not (inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)):
        raise ConfigError(f"a rollout is an async function (`async def {attribute}(model, scenario)`), '{name}' is not", param="rollout")
    return function


def read_scenarios(path: Path) -> list[Scenario]:
    """One scenario a line: an object with `input` (and `id`, `metadata`), or any other JSON value as the input itself.

    A scenario without an id gets one made of its content, so that two evaluations can be compared scenario by scenario.
    Raises InvalidRequest naming the line.
    """
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        raise InvalidRequest(f"the scenario file {path} cannot be read: {error}", param="scenarios") from error
    found: list[Scenario] = []
    named: set[str] = set()
    for number, line in enumerate(lines, 1):
        if line.strip():
            scenario = _scenario(line, f"{path} line {number}")
            if "id" not in scenario.model_fields_set:
                scenario = scenario.model_copy(update={"id": as_scenarios([scenario.model_dump(exclude={"id"})])[0].id})
            elif scenario.id in named:
                raise InvalidRequest(f"{path} line {number}: the id '{scenario.id}' was given before", param="scenarios")
            named.add(scenario.id)
            found.append(scenario)
    if not found:
        raise InvalidRequest(f"{path} has no scenario", param="scenarios")
    return found


def _scenario(line: bytes, where: str) -> Scenario:
    try:
        value = json.loads(line.decode("utf-8"), parse_constant=_refuse_constant)
        return Scenario.model_validate(value if isinstance(value, dict) and "input" in value else {"input": value})
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidRequest(f"{where}: {'.'.join(map(str, first['loc']))}: {first['msg']}", param="scenarios") from error
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{where} is not JSON: {error}", param="scenarios") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
