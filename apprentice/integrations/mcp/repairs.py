"""Faults of servers that can be put right on the way in, so that one wrong tool does not make a whole server unusable.

The SDK checks every answer as a whole against the protocol's schema. Here an answer is changed as little as lets it pass, and
every kind of change is noted once.
"""

from __future__ import annotations

import json
from typing import Any, cast

SHOWN = 120
Json = dict[str, Any]  # Any: what a server sent


class Repairs:
    """What was put right in one session, one sentence each, each once."""

    def __init__(self) -> None:
        self._found: dict[str, None] = {}
        self.lines = 0
        """Lines on standard output that were no messages."""
        self.first_line = ""
        self.output_schemas: dict[str, Any] = {}
        """The output schemas that were taken out of the tool list."""

    def add(self, sentence: str) -> None:
        self._found.setdefault(sentence)

    def banner(self, text: str) -> None:
        self.lines += 1
        self.first_line = self.first_line or text[:SHOWN]

    @property
    def sentences(self) -> tuple[str, ...]:
        if not self.lines:
            return tuple(self._found)
        many = "a line" if self.lines == 1 else f"{self.lines} lines"
        return (*self._found, f"{many} on standard output that were no messages were left out, the first one: {self.first_line}")


def repaired_envelope(raw: Json, repairs: Repairs) -> Json:
    """A JSON object that is no valid JSON-RPC message, made one if it plainly was meant as one."""
    fixed = dict(raw)
    if fixed.get("jsonrpc") != "2.0" and ("method" in fixed or "id" in fixed):
        fixed["jsonrpc"] = "2.0"
        repairs.add("messages without jsonrpc 2.0 were taken for it")
    if "method" in fixed:
        if not isinstance(fixed.get("params", {}), dict):
            fixed.pop("params", None)
            repairs.add("parameters that are no object were left out")
        return fixed
    error = fixed.get("error")
    if error is not None:
        known = cast("Json", error) if isinstance(error, dict) else {"message": error if isinstance(error, str) else json.dumps(error)}
        code = known.get("code")
        fixed = {
            "jsonrpc": "2.0",
            "id": fixed.get("id"),
            "error": {"code": code if isinstance(code, int) else -32603, "message": str(known.get("message", ""))},
        }
        repairs.add("errors in another form than JSON-RPC's were read as errors")
    elif "id" in fixed and not isinstance(fixed.get("result"), dict):
        result = fixed.get("result")
        fixed["result"] = {} if result is None else {"content": result}
        fixed.pop("error", None)
        repairs.add("results that are no object were made one")
    elif "error" in fixed:
        del fixed["error"]
        repairs.add("results with an empty error beside them were taken for results")
    return fixed


def repaired_result(method: str, result: Json, version: str, repairs: Repairs) -> Json:
    """The result of a request, valid if it can be made so. `result` itself is not changed."""
    repair = {"initialize": _initialize, "server/discover": _discover, "tools/list": _tools, "tools/call": _call}.get(method)
    fixed = repair(result, version, repairs) if repair else result
    cursor = fixed.get("nextCursor")
    if cursor is not None and not isinstance(cursor, str):
        fixed = {**fixed, "nextCursor": str(cursor)}
        repairs.add("a cursor that is no text was made one")
    return _hints(method, fixed, version, repairs)


def _initialize(result: Json, _: str, repairs: Repairs) -> Json:
    fixed = dict(result)
    if not isinstance(fixed.get("capabilities"), dict):
        fixed["capabilities"] = {}
        repairs.add("the handshake's missing capabilities were taken for none")
    info = fixed.get("serverInfo")
    known = cast("Json", info) if isinstance(info, dict) else {}
    if not isinstance(known.get("name"), str) or not isinstance(known.get("version"), str):
        fixed["serverInfo"] = {**known, "name": str(known.get("name") or "unknown"), "version": str(known.get("version") or "0")}
        repairs.add("the handshake's missing server name or version was filled in")
    if not isinstance(fixed.get("protocolVersion"), str):
        fixed["protocolVersion"] = "2024-11-05"
        repairs.add("the handshake's missing protocol version was taken for the oldest")
    if not isinstance(fixed.get("instructions", ""), str):
        del fixed["instructions"]
        repairs.add("instructions that are no text were left out")
    return fixed


def _discover(result: Json, _: str, repairs: Repairs) -> Json:
    if "supportedVersions" not in result or isinstance(result.get("capabilities"), dict):
        return result
    repairs.add("the handshake's missing capabilities were taken for none")
    return {**result, "capabilities": {}}


def _hints(method: str, result: Json, version: str, repairs: Repairs) -> Json:
    """What the newest protocol wants in every listing, for servers that speak it by half."""
    if version < "2026" or method not in ("tools/list", "resources/list", "resources/read", "prompts/list", "resources/templates/list"):
        return result
    missing: Json = {
        key: value for key, value in (("ttlMs", 0), ("cacheScope", "private"), ("resultType", "complete")) if key not in result
    }
    if missing:
        repairs.add("listings without the cache hints of their protocol version were given some")
    return {**result, **missing}


def _tools(result: Json, version: str, repairs: Repairs) -> Json:
    entries = result.get("tools")
    if not isinstance(entries, list):
        repairs.add("a tool list that is no list was taken for an empty one")
        entries = []
    kept = [fixed for entry in cast("list[object]", entries) if (fixed := _tool(entry, version, repairs)) is not None]
    return {**result, "tools": kept}


def _tool(entry: object, version: str, repairs: Repairs) -> Json | None:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):  # pyright: ignore[reportUnknownMemberType]
        repairs.add("an entry of the tool list without a name was left out")
        return None
    tool = dict(cast("Json", entry))
    name = tool["name"]
    schema = tool.get("inputSchema")
    if not isinstance(schema, dict):
        tool["inputSchema"] = {"type": "object", "properties": {}}
        repairs.add(f"the tool {name!r} got the input schema that it lacks")
    elif cast("Json", schema).get("type") != "object":
        tool["inputSchema"] = {**cast("Json", schema), "type": "object"}
        repairs.add(f"the input schema of the tool {name!r} got the type object")
    if (output := tool.pop("outputSchema", None)) is not None:
        # Left in, a result that does not keep to it would make the SDK raise after the tool was run.
        repairs.output_schemas[name] = output
        if not isinstance(output, dict) or cast("Json", output).get("type") != "object":
            repairs.add(f"the output schema of the tool {name!r}, which is not one of an object, was left out")
    if _valid("tools/list", {"tools": [tool], "ttlMs": 0, "cacheScope": "private", "resultType": "complete"}, version):
        return tool
    plain: Json = {"name": name, "inputSchema": tool["inputSchema"]}
    if isinstance(tool.get("description"), str):
        plain["description"] = tool["description"]
    if not _valid("tools/list", {"tools": [plain], "ttlMs": 0, "cacheScope": "private", "resultType": "complete"}, version):
        repairs.add(f"the tool {name!r} was left out, because its entry cannot be read")
        return None
    repairs.add(f"all but name, description and schema of the tool {name!r} was left out, because it cannot be read")
    return plain


def _call(result: Json, version: str, repairs: Repairs) -> Json:
    if result.get("resultType") == "input_required":
        return result
    fixed = dict(result)
    content = fixed.get("content")
    if not isinstance(content, list):
        block = cast("Any", content)
        fixed["content"] = [] if content is None else [block] if isinstance(content, dict) else [{"type": "text", "text": _text(content)}]
        if content is not None or "structuredContent" not in fixed:
            repairs.add("results whose content is no list were made one")
    if "isError" in fixed and not isinstance(fixed["isError"], bool):
        fixed["isError"] = fixed["isError"] in (1, "true", "True")
        repairs.add("results whose isError is neither true nor false were read as one of them")
    structured = fixed.get("structuredContent")
    if version < "2026" and "structuredContent" in fixed and not isinstance(structured, dict):
        if structured is None:
            del fixed["structuredContent"]
        else:
            fixed["structuredContent"] = {"result": structured}
            repairs.add("structured results that are no object were put into one under 'result'")
    if _valid("tools/call", fixed if version < "2026" else {"resultType": "complete", **fixed}, version):
        return fixed if version < "2026" or "resultType" in fixed else {**fixed, "resultType": "complete"}
    blocks = cast("list[object]", fixed["content"])
    fixed["content"] = [
        block if _valid("tools/call", {"content": [block], "resultType": "complete"}, version) else _as_text(block) for block in blocks
    ]
    repairs.add("parts of results of an unknown kind were made texts")
    return fixed


def _as_text(block: object) -> Json:
    text = cast("Json", block).get("text") if isinstance(block, dict) else None
    return {"type": "text", "text": text if isinstance(text, str) else json.dumps(block, ensure_ascii=False)}


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _valid(method: str, result: Json, version: str) -> bool:
    from mcp_types import methods
    from pydantic import ValidationError

    try:
        methods.validate_server_result(method, version, result)
    except ValidationError:
        return False
    except (KeyError, ValueError):  # a version that the SDK does not know: it does not check either
        return True
    return True
