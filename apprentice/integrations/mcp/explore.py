"""Exploring: harmless calls that find out which values a server's parameters take.

Only tools that say they read (annotation first, then their verb, then the user's allow list) are called, never one that is
destructive or deletes. A server with tools that may change data which are not private to a rollout is refused.
What is found: enumerations, defaults and examples of schemas, values in descriptions, resources, files and tables of the
fixture, and what the calls answer, by key.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from pydantic import JsonValue

from ...core.client.progress import Progress, progress_of
from ...core.errors import ConfigError
from ...core.records import JsonObject
from .environment import McpEnvironment, SessionPool
from .kinds import READING, Leaf, Shape, harmful, shape_of, singular, words_of
from .redaction import MARK
from .reply import ToolReply
from .spec import WORKDIR, McpServer
from .stock import MAKERS
from .tools import McpTool
from .values import leaves_of, parsed, put

INVENTED = frozenset({"timezone", "time", "date", "datetime", "expression", "currency", "language", "country", "city", "color"})
"""Kinds of which any plausible value will do, as far as one can know."""
MOST_VALUES = 200
_SECRET = re.compile(r"\b(?:env|environment|secret|secrets|password|passwords|credential|credentials|token|tokens)\b")
_SLOW = re.compile(r"\b(?:long running|sleep|wait|delay|subscribe)\b")
_QUOTED = re.compile(r"['\"`]([^'\"`\n]{1,60})['\"`]")


@dataclass(frozen=True, slots=True)
class ExploreOptions:
    """`allow`: further tools (fnmatch patterns) that the user says are harmless. `real_data`: see `protect`. `seconds`: of one call."""

    allow: tuple[str, ...] = ()
    real_data: bool = False
    calls: int = 40
    seconds: float = 20.0
    seed: int = 0


@dataclass(slots=True)
class Exploration:
    """What is known of the servers of a pool before the first scenario is made."""

    shapes: tuple[Shape, ...] = ()
    values: dict[str, list[JsonValue]] = field(default_factory=dict[str, list[JsonValue]])
    """By kind ("path", "table"), by label ("entity name"), and by place in a tool ("tool.argument")."""
    tables: dict[str, JsonObject] = field(default_factory=dict[str, JsonObject])
    """Of databases in the private folder: {"columns": [...], "rows": [...]}."""
    calls: list[ToolReply] = field(default_factory=list[ToolReply])
    state: JsonObject = field(default_factory=dict[str, JsonValue])
    """Of a fresh environment."""
    prefix: str = ""
    """What stands in front of a path in the private folder: nothing, or `{workdir}/`."""
    changing: frozenset[str] = frozenset()
    """Functions that change something and may be tried: what they change is private and thrown away, or the user says so."""

    def shape(self, function: str) -> Shape | None:
        return next((shape for shape in self.shapes if shape.function == function), None)

    def add(self, key: str, value: JsonValue) -> None:
        known = self.values.setdefault(key, [])
        hidden = isinstance(value, str) and MARK in value  # a secret, of which nothing can be asked
        if value not in known and value not in ("", None) and not hidden and len(known) < MOST_VALUES:
            known.append(value)

    def known(self, shape: Shape, leaf: Leaf) -> list[JsonValue]:
        """Values that were seen for a leaf: stated for this very place, of its label, of its kind."""
        place = f"{shape.function}.{'.'.join(leaf.path)}"
        label = "" if leaf.label in MAKERS else leaf.label  # a folder's parameter may be called `path`
        return [*dict.fromkeys([*self.values.get(place, []), *self.values.get(label, []), *self.values.get(leaf.kind, [])])]


async def explore(pool: SessionPool, options: ExploreOptions | None = None, *, progress: bool | Progress = False) -> Exploration:
    """Look around in a fresh environment. Raises what `pool.environment()` and `protect` raise; a call that fails is only noted.

    Whatever is synthesized from the exploration was permitted here.
    """
    options = options or ExploreOptions()
    display = progress_of(progress)
    display.begin("Looking around", 0)
    try:
        async with pool.environment() as env:
            if not options.real_data:
                protect(pool.servers, [tool for tool in env.toolset.tools if not _named(tool, options)])
            found = Exploration(state=await env.state())
            found.shapes = tuple(shape_of(name, tool) for name, tool in zip(env.toolset.names, env.toolset.tools, strict=True))
            found.changing = frozenset(shape.function for shape in found.shapes if not shape.reads)
            _from_schemas(found)
            await _from_servers(env, found)
            _from_state(found)
            await _from_calls(env, found, options, display)
            return found
    finally:
        display.end()


def harmless(shape: Shape, options: ExploreOptions) -> bool:
    """Whether a tool may be called to look around."""
    if harmful(shape.tool) or secret_or_slow(shape.tool):
        return False
    if _named(shape.tool, options):
        return True
    return shape.reads and (shape.tool.read_only is True or shape.verb in READING or any(leaf.kind == "sql_read" for leaf in shape.leaves))


def secret_or_slow(tool: McpTool) -> bool:
    """Tools that tell secrets or only take time are left alone, here and in tasks."""
    words = " ".join(words_of(tool.name))
    return bool(_SECRET.search(words) or _SLOW.search(words))


NAMED = 3
"""So many tools are named in a sentence."""


def protect(servers: Iterable[McpServer], tools: Sequence[McpTool]) -> None:
    """ConfigError if rollouts with these tools might change data that are not theirs alone, such as the user's own."""
    for server in servers:
        if why := endangered(server, tools):
            raise ConfigError(why, param="real_data")


def endangered(server: McpServer, tools: Iterable[McpTool]) -> str:
    """Which of these tools may change data that are not private to a rollout, and the ways out, as a sentence; "" if none may."""
    changing = [tool.name for tool in tools if tool.server == server.name and not shape_of(tool.name, tool).reads]
    if server.private or not changing:
        return ""
    more = ", …" if len(changing) > NAMED else ""
    process = "" if server.isolation == "process" else ", with --isolation process"
    private = f"write {{workdir}} in its command, environment or cwd where its data lie{process}, " if server.command else ""
    return (
        f"the server {server.name!r} has tools that may change data which rollouts do not have for themselves "
        f"({', '.join(changing[:NAMED])}{more}): {private}leave those tools out with --allow or --deny, "
        "or say --real-data if its data may change"
    )


def _named(tool: McpTool, options: ExploreOptions) -> bool:
    return any(fnmatchcase(tool.name, pattern) for pattern in options.allow)


def _from_schemas(found: Exploration) -> None:
    for shape in found.shapes:
        for leaf in shape.leaves:
            place = f"{shape.function}.{'.'.join(leaf.path)}"
            examples = leaf.schema.get("examples")
            stated = [*leaf.options, *(examples if isinstance(examples, list) else [leaf.schema.get("example")])]
            if leaf.kind not in ("boolean", "integer", "number", *INVENTED) and not leaf.options:
                stated.append(leaf.schema.get("default"))
            described = str(leaf.schema.get("description") or "")
            if leaf.kind not in INVENTED and re.search(r"e\.g\.|for example|such as|one of|like", described, re.IGNORECASE):
                stated += _QUOTED.findall(described)
            for value in stated:
                if isinstance(value, str | int | float) and not isinstance(value, bool):
                    found.add(place, value)


async def _from_servers(env: McpEnvironment, found: Exploration) -> None:
    for session in env.sessions.values():
        for resource in await session.list_resources():
            if isinstance(resource.get("uri"), str):
                found.add("uri", resource["uri"])


def _from_state(found: Exploration) -> None:
    for server in found.state.values():
        files = server.get("files") if isinstance(server, dict) else None
        for name, content in (files if isinstance(files, dict) else {}).items():
            if isinstance(content, dict):
                tables = content.get("tables")
                for table, rows in (tables if isinstance(tables, dict) else {}).items():
                    if isinstance(rows, dict):
                        found.tables[table] = rows
                        found.add("table", table)
                continue
            found.add("folder" if content == "empty folder" else "path", name)
            for parent in PurePosixPath(name).parents:
                if str(parent) != ".":
                    found.add("folder", str(parent))
            if isinstance(content, str) and not content.startswith("sha256:"):
                found.add("text file", name)


async def _from_calls(env: McpEnvironment, found: Exploration, options: ExploreOptions, display: Progress) -> None:
    """First tools that need nothing, then the others with what is known by then."""
    chance = random.Random(options.seed)
    shapes = [shape for shape in found.shapes if harmless(shape, options)]
    await _find_prefix(env, found, shapes, options)
    for shape in sorted(shapes, key=lambda s: len(s.required)):
        for _ in range(1 if not shape.required else 3):
            if len(found.calls) >= options.calls:
                return
            arguments = _arguments(found, shape, chance)
            if arguments is None:
                break
            if any(done.function == shape.function and done.arguments == arguments for done in found.calls):
                continue
            display.note(shape.function)
            reply = await _call(env, shape.function, arguments, options)
            found.calls.append(reply)
            if reply.ok:
                _from_result(found, shape, reply)


async def _find_prefix(env: McpEnvironment, found: Exploration, shapes: Sequence[Shape], options: ExploreOptions) -> None:
    """Some servers take paths as seen from the private folder, some only whole ones."""
    for shape in shapes:
        if len(shape.required) != 1 or shape.required[0].kind != "folder":
            continue
        for prefix, path in (("", "."), (f"{WORKDIR}/", WORKDIR)):
            arguments: JsonObject = {}
            put(arguments, shape.required[0].path, path)
            if (await _call(env, shape.function, arguments, options)).ok:
                found.prefix = prefix
                found.add("folder", "." if not prefix else WORKDIR)
                return


async def _call(env: McpEnvironment, function: str, arguments: JsonObject, options: ExploreOptions) -> ToolReply:
    try:
        return await asyncio.wait_for(env.call(function, arguments), options.seconds)
    except TimeoutError:
        return ToolReply("", function, arguments, "timeout", f"no answer within {options.seconds:g} s", function=function)


def _arguments(found: Exploration, shape: Shape, chance: random.Random) -> JsonObject | None:
    arguments: JsonObject = {}
    for leaf in shape.required:
        known = found.known(shape, leaf)
        if leaf.kind in INVENTED and not known:
            value: JsonValue = MAKERS[leaf.kind](chance)
        elif leaf.kind in ("integer", "number"):
            value = chance.randrange(1, 6)
        elif leaf.kind == "boolean":
            value = False
        elif known:
            value = chance.choice(known)
        elif leaf.kind == "glob":
            value = "*"
        elif leaf.kind == "sql_read" and found.tables:
            value = f"SELECT * FROM {chance.choice(sorted(found.tables))} LIMIT 3"
        else:
            return None
        put(arguments, leaf.path, value)
    return arguments


_MARKED = re.compile(r"^\[(FILE|DIR)\] (.+?)(?:\s{2,}.*)?$")


def _from_result(found: Exploration, shape: Shape, reply: ToolReply) -> None:
    """Names, ids and paths in a result, under the label of their key, and of the tool's object where it is a list of things."""
    thing = " ".join(singular(word) for word in shape.object.split())
    value = parsed(reply.full_text or reply.text)
    listing = shape.verb in ("list", "search")
    if isinstance(value, str):
        for line in value.splitlines() if listing else ():
            marked = _MARKED.match(line.strip())
            if marked:
                base = next((str(v) for _, v in leaves_of(reply.arguments)), ".")
                path = marked[2] if base in (".", WORKDIR) else f"{base}/{marked[2]}"
                found.add("folder" if marked[1] == "DIR" else "path", found.prefix + path)
        return
    for path, leaf in leaves_of(value):
        key = next((part for part in reversed(path) if not part.startswith("[")), "")
        if not isinstance(leaf, str) or not 0 < len(leaf) <= 80 or "\n" in leaf:
            continue
        words = words_of(key)
        label = " ".join(words)
        if words and words[-1] in ("name", "id", "title", "path", "slug", "key", "uri", "code"):
            found.add(label if len(words) > 1 or not listing else f"{thing} {label}", leaf)
            kind = next((kind for kind in ("table", "path", "folder") if kind in thing.split() or kind == words[-1]), None)
            if kind and listing:
                found.add(kind, leaf)
            elif words[-1] in ("name", "title") and not kind:
                found.add("name", leaf)
        elif not key and listing:
            found.add(thing, leaf)
            if thing.split()[-1:] == ["table"]:
                found.add("table", leaf)
