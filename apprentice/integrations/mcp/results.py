"""What a tool call's result comes to: one text for the model, and an honest outcome.

Servers answer with text, structured values, pictures, files and links, sometimes all at once; and some report a plain
failure as a success. Results are data: whatever a text asks for, it is only shown.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Sequence

from pydantic import JsonValue

from ...core.records import JsonObject, ToolOutcome
from .failures import reported_failure
from .reply import ToolReply

DEFAULT_LIMIT = 4_000
"""Characters of a result that a model is shown."""


def reply_of(
    result: JsonObject,
    *,
    server: str,
    tool: str,
    arguments: JsonValue,
    limit: int = DEFAULT_LIMIT,
    seconds: float = 0.0,
    notes: Sequence[str] = (),
    function: str = "",
) -> ToolReply:
    """The reply for a result of `tools/call`, `resources/read` or `prompts/get`, dumped by alias without unset fields."""
    full, structured = result_text(result), result.get("structuredContent")
    return ToolReply(
        server=server,
        tool=tool,
        arguments=arguments,
        outcome=outcome_of(result),
        text=cap_text(full, limit),
        full_text=full,
        structured=structured,
        seconds=seconds,
        notes=tuple(notes),
        function=function,
    )


def outcome_of(result: JsonObject) -> ToolOutcome:
    """`tool_error` if the server says so, `reported_failure` if it says success and its text is a plain failure, else `ok`."""
    if result.get("isError") is True:
        return "tool_error"
    if "content" not in result and "structuredContent" not in result:
        return "ok"  # a resource or a prompt: its text is a document, not a report
    texts = [block["text"] for block in _objects(result.get("content")) if isinstance(block.get("text"), str)]
    return "reported_failure" if reported_failure("\n".join(map(str, texts)), result.get("structuredContent")) else "ok"


def result_text(result: JsonObject) -> str:
    """All of a result as text; `_meta` is left out. A result with only a structured value is that value's JSON."""
    if "messages" in result:
        return "\n".join(_message(message) for message in _objects(result["messages"]))
    if "contents" in result:
        return "\n".join(_resource(item) for item in _objects(result["contents"]))
    content = result.get("content")
    if isinstance(content, str):
        return content
    parts = [_block(block) for block in _objects(content)]
    if not parts and result.get("structuredContent") is not None:
        return json.dumps(result["structuredContent"], ensure_ascii=False)
    return "\n".join(parts)


def cap_text(text: str, limit: int = DEFAULT_LIMIT) -> str:
    """`text` if it has at most `limit` characters, else its head (two thirds) and tail, with the number left out between them."""
    if len(text) <= limit:
        return text
    room = max(limit - len(_gap(len(text))), 0)
    head = room * 2 // 3
    tail = room - head
    return text[:head] + _gap(len(text) - room) + (text[-tail:] if tail else "")


def _gap(count: int) -> str:
    return f"\n… [{count:,} characters left out] …\n"


def _objects(value: JsonValue) -> list[JsonObject]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else [value] if isinstance(value, dict) else []


def _message(message: JsonObject) -> str:
    content = message.get("content")
    shown = content if isinstance(content, str) else "\n".join(_block(block) for block in _objects(content))
    return f"{message.get('role', 'user')}: {shown}"


def _block(block: JsonObject) -> str:
    kind = block.get("type")
    if isinstance(block.get("text"), str):
        return str(block["text"])
    if kind in ("image", "audio"):
        return f"[{kind} {_sized(block.get('mimeType'), block.get('data'))}]"
    if kind == "resource":
        return "\n".join(_resource(item) for item in _objects(block.get("resource")))
    if kind == "resource_link":
        facts = [str(block[key]) for key in ("name", "mimeType", "description") if isinstance(block.get(key), str)]
        return f"[link {block.get('uri')}{' (' + ', '.join(facts) + ')' if facts else ''}]"
    return json.dumps({key: value for key, value in block.items() if key != "_meta"}, ensure_ascii=False)


def _resource(item: JsonObject) -> str:
    if isinstance(item.get("text"), str):
        return str(item["text"])
    if isinstance(item.get("blob"), str):
        return f"[file {item.get('uri')} {_sized(item.get('mimeType'), item['blob'])}]"
    return f"[file {item.get('uri')}]"


def _sized(mime: JsonValue, data: JsonValue) -> str:
    """Type, size and hash of what base64 `data` holds (of the characters themselves if it is not base64)."""
    text = data if isinstance(data, str) else ""
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raw = text.encode(errors="replace")
    kind = mime if isinstance(mime, str) else "of unknown type"
    return f"{kind}, {_size(len(raw))}, sha256 {hashlib.sha256(raw).hexdigest()[:12]}"


def _size(count: int) -> str:
    if count < 1_000:
        return f"{count} bytes"
    return f"{count / 1_000:.1f} kB" if count < 1_000_000 else f"{count / 1_000_000:.1f} MB"
