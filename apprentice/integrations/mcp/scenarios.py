"""The scenario file: JSON lines of core's Scenario, to read, edit and use again; and how its held-out part is chosen.

`metadata` of a scenario (see `ScenarioNotes`): the reference calls with their results as the model sees them, the facts that
an answer must hold, the state that the calls leave, what moves between runs, the kind, the wording. The held-out part shares
no argument value with training, has other wordings, and holds tools that training does not have where there are enough.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from pydantic import Field, JsonValue, ValidationError

from ...core.errors import ConfigError
from ...core.records import JsonObject, Record, Scenario
from .values import canonical, leaves_of, sql_values

ENOUGH_TOOLS = 8
"""With so many tools in the scenarios, one in so many is held out wholly."""
FEW_OPTIONS = 3
"""A parameter with at most so many values may have them in both parts, if there is no other way."""
ROOT = "."
"""The folder that everything is in: it may be in both parts, for it cannot be another one."""
ROOTS = frozenset({".", "./", "/", "{workdir}", "{workdir}/"})
COMMON = 0.5
"""So may a value that stands in this share of all calls of a tool."""


class ReferenceCall(Record):
    tool: str
    """The function's name, as the model knows it."""
    arguments: JsonObject = Field(default_factory=dict)
    result: str = ""
    changes: bool = False
    """Whether it changes something, as far as one can know."""
    volatile: tuple[str, ...] = ()
    """What moves in its result (see masks.py)."""


class ScenarioNotes(Record):
    """What `metadata` holds for the checks; further keys are allowed there."""

    calls: tuple[ReferenceCall, ...]
    facts: tuple[str, ...] = ()
    live_facts: tuple[JsonObject, ...] = ()
    """Facts that move (`{"call", "path", "form"}`): read from the rollout's own result."""
    state: JsonObject | None = None
    """`{"changed": {entry: content or null}, "rest": digest of the other entries, "ignored": [entries that move]}`."""


def notes_of(scenario: Scenario) -> ScenarioNotes:
    """The notes of a scenario. ConfigError names what is wrong."""
    known = {key: scenario.metadata[key] for key in ScenarioNotes.model_fields if key in scenario.metadata}
    try:
        return ScenarioNotes.model_validate(known)
    except ValidationError as cause:
        error = cause.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, error["loc"]))
        raise ConfigError(f"scenario {scenario.id}: metadata.{where} is wrong: {error['msg']}", param=where) from cause


def write_scenarios(path: Path, scenarios: Iterable[Scenario]) -> None:
    """One scenario a line; the file is whole or not there."""
    fresh = path.with_name(path.name + ".new")
    lines = [json.dumps(scenario.model_dump(mode="json"), ensure_ascii=False) for scenario in scenarios]
    fresh.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    fresh.replace(path)


def read_scenarios(path: Path) -> list[Scenario]:
    """All scenarios of a file. ConfigError names the line that is wrong, and how."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as cause:
        raise ConfigError(f"the scenario file {path} cannot be read: {cause}", param="scenarios") from cause
    found: list[Scenario] = []
    lines: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        scenario = _scenario(path, number, line)
        if scenario.id in lines:
            raise ConfigError(f"{path}, line {number}: the id {scenario.id!r} is also that of line {lines[scenario.id]}", param="id")
        lines[scenario.id] = number
        found.append(scenario)
    if not found:
        raise ConfigError(f"the scenario file {path} holds no scenario", param="scenarios")
    return found


def _scenario(path: Path, number: int, line: str) -> Scenario:
    try:
        scenario = Scenario.model_validate(json.loads(line))
        notes_of(scenario)
    except ValidationError as cause:
        error = cause.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, error["loc"])) or "the scenario"
        raise ConfigError(f"{path}, line {number}: {where} is wrong: {error['msg']}", param=where) from cause
    except ConfigError as cause:
        raise ConfigError(f"{path}, line {number}: {cause.message}", param=cause.param) from cause
    except ValueError as cause:
        raise ConfigError(f"{path}, line {number}: a scenario is one JSON object a line, and this is no JSON: {cause}") from cause
    if not isinstance(scenario.input, str) or not scenario.input.strip():
        raise ConfigError(f"{path}, line {number}: `input` is the request, a text, got {json.dumps(scenario.input)[:60]}", param="input")
    return scenario


# ---- values and splits ------------------------------------------------------------------------------------------------------


def argument_values(scenario: Scenario) -> set[str]:
    """The leaves of all arguments of a scenario, in one spelling, and what SQL names; booleans and nulls are none."""
    return {value for _, value in _placed(scenario)}


def _placed(scenario: Scenario) -> list[tuple[str, str]]:
    """(place, value) of every argument."""
    found: list[tuple[str, str]] = []
    for call in notes_of(scenario).calls:
        for path, leaf in leaves_of(call.arguments):
            if leaf is None or isinstance(leaf, bool) or leaf in ("", "*"):
                continue
            general = ".".join("[]" if part.startswith("[") else part for part in path)
            key = path[-1] if path and not path[-1].startswith("[") else general
            place = f"{call.tool}.{general}"
            found.append((place, ROOT if leaf in ROOTS else canonical({key: leaf}).lower().split(": ", 1)[1].rstrip("}").strip('"')))
            found += [(place, value) for value in sql_values(str(leaf))]
    return found


def wording_of(scenario: Scenario) -> str | None:
    frame, number = scenario.metadata.get("frame"), scenario.metadata.get("wording")
    return f"wording {frame}#{number}" if frame not in (None, "free") else None


def _calls_of(scenario: Scenario) -> str:
    """The same calls are never in both parts, whether they have arguments or not."""
    return "calls " + canonical([[call.tool, call.arguments] for call in notes_of(scenario).calls])


def meant_for_test(scenario: Scenario) -> bool:
    """Whether it was made for the held-out part: every third wording is (see frames.py)."""
    number = scenario.metadata.get("wording")
    return isinstance(number, int) and number % 3 == 2


def split(scenarios: Sequence[Scenario], held_out: int, seed: int = 0) -> tuple[list[Scenario], list[Scenario]]:
    """(train, test): the parts share no argument value and no wording. Scenarios that would tie them together are dropped.

    Values that cannot be kept apart (of parameters with at most three values, or needed by most calls of a tool) may be in
    both parts; each test scenario's `shared_values` says which. `held_out`: at most so many test scenarios.
    """
    chance = random.Random(seed)
    if len(scenarios) < 2 or held_out < 1:
        return [_marked(scenario, "train") for scenario in scenarios], []
    best: tuple[list[Scenario], list[Scenario]] = ([], [])
    for exempt in (frozenset({ROOT}), _unavoidable(scenarios)):
        parts = _parts(scenarios, held_out, exempt, chance)
        if _worth(parts, held_out) > _worth(best, held_out):
            best = parts
        if _worth(best, held_out) >= min(held_out, len(scenarios) // 4):
            break
    train, test = _hide_tools(*best)
    test = _balanced(test, held_out, chance)
    shared = {value for scenario in train for value in argument_values(scenario)}
    return [_marked(scenario, "train") for scenario in train], [_marked(scenario, "test", shared) for scenario in test]


def _worth(parts: tuple[list[Scenario], list[Scenario]], held_out: int) -> float:
    return min(len(parts[0]) / 2, min(len(parts[1]), held_out))


def _unavoidable(scenarios: Sequence[Scenario]) -> frozenset[str]:
    """Values of parameters with few options, and values that most calls of a tool have."""
    options: dict[str, Counter[str]] = defaultdict(Counter)
    tools: Counter[str] = Counter()
    for scenario in scenarios:
        tools.update(call.tool for call in notes_of(scenario).calls)
        for place, value in _placed(scenario):
            options[place][value] += 1
    found: set[str] = set()
    for place, values in options.items():
        total = tools[place.split(".", 1)[0]]
        few = len(values) <= FEW_OPTIONS
        found |= {value for value, count in values.items() if few or count >= COMMON * total}
    return frozenset({*found, ROOT})


def _parts(
    scenarios: Sequence[Scenario], held_out: int, exempt: frozenset[str], chance: random.Random
) -> tuple[list[Scenario], list[Scenario]]:
    """Whole clusters of scenarios that hang together by values or wordings go to one part; one too big to give away is cut."""
    keys = [{*(argument_values(s) - exempt), *filter(None, [wording_of(s)]), _calls_of(s)} for s in scenarios]
    clusters = _clusters(keys)
    chance.shuffle(clusters)
    clusters.sort(key=len)
    wanted = min(held_out, max(1, len(scenarios) // 2))
    meant = [index for cluster in clusters if all(meant_for_test(scenarios[i]) for i in cluster) for index in cluster]
    chosen = meant if len(meant) >= wanted * 2 // 3 else []
    if not chosen:
        fitting = [cluster for cluster in clusters if len(cluster) <= 1.5 * wanted]
        for cluster in sorted(fitting, key=len, reverse=True):
            if len(chosen) < wanted:
                chosen = [*chosen, *cluster]
    if len(chosen) < wanted // 2 + 1:
        chosen = _cut(keys, wanted, chance)
    taken = set[str]().union(*(keys[index] for index in chosen)) if chosen else set[str]()
    inside = set(chosen)
    train = [scenario for index, scenario in enumerate(scenarios) if index not in inside and not keys[index] & taken]
    return train, [scenarios[index] for index in sorted(inside)]


def _clusters(keys: Sequence[set[str]]) -> list[list[int]]:
    """Indices that hang together by a common key."""
    parent = list(range(len(keys)))

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    first: dict[str, int] = {}
    for index, own in enumerate(keys):
        for key in own:
            parent[root(index)] = root(first.setdefault(key, index))
    found: dict[int, list[int]] = defaultdict(list)
    for index in range(len(keys)):
        found[root(index)].append(index)
    return list(found.values())


def _cut(keys: Sequence[set[str]], wanted: int, chance: random.Random) -> list[int]:
    """Grow a held-out part out of one cluster: always the scenario that ties the fewest others to it."""
    users: dict[str, set[int]] = defaultdict(set)
    for index, own in enumerate(keys):
        for key in own:
            users[key].add(index)
    order = list(range(len(keys)))
    chance.shuffle(order)
    chosen: set[int] = set()
    lost: set[int] = set()
    while len(chosen) < min(wanted, len(keys) // 3):
        rest = [index for index in order if index not in chosen]
        if not rest:
            break
        cost = {index: len(set[int]().union(*(users[key] for key in keys[index])) - chosen - lost) - 2 * (index in lost) for index in rest}
        index = min(rest, key=lambda i: cost[i])
        chosen.add(index)
        lost |= set[int]().union(*(users[key] for key in keys[index]))
    return sorted(chosen)


def _tools(scenario: Scenario) -> set[str]:
    return {call.tool for call in notes_of(scenario).calls}


def _hide_tools(train: list[Scenario], test: list[Scenario]) -> tuple[list[Scenario], list[Scenario]]:
    """Take tools out of training altogether where the scenarios have enough of them: those that cost the fewest scenarios."""
    uses: Counter[str] = Counter(tool for scenario in train for tool in _tools(scenario))
    tested = Counter(tool for scenario in test for tool in _tools(scenario))
    if len({*uses, *tested}) < ENOUGH_TOOLS:
        return train, test
    hidden: set[str] = set()
    for tool in sorted((tool for tool in tested if uses[tool]), key=lambda tool: (uses[tool], tool)):
        if len(hidden) < len(uses) // ENOUGH_TOOLS:
            hidden.add(tool)
    return [scenario for scenario in train if not _tools(scenario) & hidden], test


def _balanced(test: list[Scenario], held_out: int, chance: random.Random) -> list[Scenario]:
    """At most `held_out`, of every kind and tool alike."""
    groups: dict[tuple[str, ...], list[Scenario]] = defaultdict(list)
    for scenario in test:
        groups[tuple(call.tool for call in notes_of(scenario).calls)].append(scenario)
    chosen: list[Scenario] = []
    queues = [groups[key] for key in sorted(groups)]
    while len(chosen) < held_out and any(queues):
        for queue in queues:
            if queue and len(chosen) < held_out:
                chosen.append(queue.pop(0))
    chance.shuffle(chosen)
    return chosen


def _marked(scenario: Scenario, part: str, shared: set[str] | None = None) -> Scenario:
    metadata: JsonObject = {**scenario.metadata, "split": part}
    common = sorted(argument_values(scenario) & shared) if shared is not None else []
    if common:
        metadata["shared_values"] = [*common]
    return scenario.model_copy(update={"metadata": metadata})


def scenario_id(server: str, text: str, calls: JsonValue) -> str:
    digest = hashlib.sha256(json.dumps([text, calls], sort_keys=True).encode()).hexdigest()[:10]
    return f"{re.sub('[^A-Za-z0-9._-]', '-', server) or 'mcp'}-{digest}"
