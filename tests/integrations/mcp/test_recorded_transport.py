"""What goes over the wire: recorded within bounded memory, repaired where it can be, never an exception."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCRequest, JSONRPCResponse, methods
from pydantic import ValidationError

from apprentice.integrations.mcp.redaction import MARK, Redactor
from apprentice.integrations.mcp.repairs import Repairs, repaired_result
from apprentice.integrations.mcp.stdio import message_of
from apprentice.integrations.mcp.transport import Observer, Recording, weight_of

OLD, NEW = "2025-11-25", "2026-07-28"


def repaired(method: str, result: dict[str, Any], version: str = OLD) -> tuple[dict[str, Any], tuple[str, ...]]:
    before = json.dumps(result)
    repairs = Repairs()
    fixed = repaired_result(method, result, version, repairs)
    assert json.dumps(result) == before  # what is recorded is what came
    methods.validate_server_result(method, version, fixed)
    return fixed, repairs.sentences


TOOL = {"name": "add", "inputSchema": {"type": "object"}}
CALLED = {"content": [{"type": "text", "text": "3"}]}


@pytest.mark.parametrize("version", [OLD, NEW])
@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"name": "add"}, "got the input schema that it lacks"),
        ({"name": "add", "inputSchema": None}, "got the input schema that it lacks"),
        ({"name": "add", "inputSchema": {"properties": {"a": {}}}}, "got the type object"),
        ({"name": "add", "inputSchema": {"type": "string"}}, "got the type object"),
        ({**TOOL, "outputSchema": {"type": "array"}}, "which is not one of an object, was left out"),
        ({**TOOL, "outputSchema": 5}, "which is not one of an object, was left out"),
        ({**TOOL, "description": 5, "annotations": "none"}, "all but name, description and schema"),
    ],
)
def test_one_wrong_tool_does_not_cost_the_others(entry: dict[str, Any], says: str, version: str) -> None:
    fixed, notes = repaired(
        "tools/list",
        {"tools": [entry, TOOL, "no tool", {"inputSchema": {}}], "ttlMs": 0, "cacheScope": "private", "resultType": "complete"},
        version,
    )
    assert [tool["name"] for tool in fixed["tools"]] == ["add", "add"]
    assert "outputSchema" not in fixed["tools"][0]
    assert says in " ".join(notes)
    assert "an entry of the tool list without a name was left out" in notes


def test_a_good_output_schema_is_taken_out_without_a_note_and_kept_for_the_caller() -> None:
    observer = Observer(Recording(Redactor([])), Repairs())
    observer.outgoing(SessionMessage(JSONRPCRequest(jsonrpc="2.0", id=1, method="tools/list")))
    schema = {"type": "object", "properties": {"a": {}}}
    answer = JSONRPCResponse(jsonrpc="2.0", id=1, result={"tools": [{**TOOL, "outputSchema": schema}]})
    seen: Any = observer.incoming(SessionMessage(answer))
    assert "outputSchema" not in seen.message.result["tools"][0]
    assert observer.listed == [{**TOOL, "outputSchema": schema}]
    assert observer.recording.frames[1].message["result"] == {"tools": [{**TOOL, "outputSchema": schema}]}
    assert observer.repairs.sentences == ()


@pytest.mark.parametrize(
    ("result", "says"),
    [
        ({"protocolVersion": OLD, "serverInfo": {"name": "x", "version": "1"}}, "missing capabilities"),
        ({"protocolVersion": OLD, "capabilities": {}}, "missing server name or version"),
        ({"capabilities": {}, "serverInfo": {"name": "x", "version": "1"}}, "missing protocol version"),
        ({"protocolVersion": OLD, "capabilities": None, "serverInfo": None, "instructions": 5}, "instructions that are no text"),
    ],
)
def test_a_handshake_that_lacks_something_is_completed(result: dict[str, Any], says: str) -> None:
    assert says in " ".join(repaired("initialize", result)[1])


@pytest.mark.parametrize(
    ("result", "content", "structured"),
    [
        ({"content": "3"}, [{"type": "text", "text": "3"}], None),
        ({"content": {"type": "text", "text": "3"}}, [{"type": "text", "text": "3"}], None),
        ({"content": None}, [], None),
        ({}, [], None),
        ({"content": ["a", {"type": "text"}]}, [{"type": "text", "text": '"a"'}, {"type": "text", "text": '{"type": "text"}'}], None),
        ({"content": [{"type": "hologram", "text": "see"}]}, [{"type": "text", "text": "see"}], None),
        ({"content": [], "structuredContent": [1, 2]}, [], {"result": [1, 2]}),
        ({"content": [], "structuredContent": None}, [], None),
        ({"content": [], "isError": "true"}, [], None),
    ],
)
def test_results_of_a_wrong_form_are_read_as_what_they_mean(result: dict[str, Any], content: Any, structured: Any) -> None:
    fixed, _ = repaired("tools/call", result)
    assert [block if block["text"] != "a" else {"type": "text", "text": '"a"'} for block in fixed["content"]] == content
    assert fixed.get("structuredContent") == structured
    assert repaired("tools/call", result)[1] != () or result["content"] == []


def test_a_sound_result_goes_through_untouched() -> None:
    for version in (OLD, NEW):
        repairs = Repairs()
        result = {**CALLED, "resultType": "complete"} if version == NEW else CALLED
        assert repaired_result("tools/call", result, version, repairs) == result
        assert repairs.sentences == ()


def test_half_modern_listings_get_the_hints_that_the_protocol_wants() -> None:
    fixed, notes = repaired("resources/list", {"resources": []}, NEW)
    assert fixed["cacheScope"] == "private"
    assert "cache hints" in notes[0]
    assert repaired("tools/list", {"tools": [], "nextCursor": 5})[0]["nextCursor"] == "5"


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ('{"jsonrpc": "2.0", "id": 1, "error": "broken"}', "JSONRPCError"),
        ('{"jsonrpc": "2.0", "id": 1, "error": {"message": "no code"}}', "JSONRPCError"),
        ('{"jsonrpc": "2.0", "id": 1, "result": "text"}', "JSONRPCResponse"),
        ('{"jsonrpc": "2.0", "id": 1, "result": null, "error": null}', "JSONRPCResponse"),
        ('{"jsonrpc": "2.0", "id": 1, "result": {}, "error": null}', "JSONRPCResponse"),
        ('{"id": 1, "result": {}}', "JSONRPCResponse"),
        ('{"jsonrpc": "2.0", "method": "notifications/x", "params": [1]}', "JSONRPCNotification"),
    ],
)
def test_a_message_of_a_wrong_form_is_still_a_message(line: str, kind: str) -> None:
    repairs = Repairs()
    assert type(message_of(line.encode(), repairs)).__name__ == kind
    assert repairs.lines == 0


def test_banners_and_bytes_that_are_no_text_are_counted_and_shown_once() -> None:
    repairs = Repairs()
    for line in (b"*** Welcome ***", b"", b"\xff\xfe", b"[1, 2]", b'{"a": 1}', b"[" * 100_000):
        assert message_of(line, repairs) is None
    assert repairs.lines == 5
    assert "5 lines on standard output" in repairs.sentences[0]
    assert repairs.sentences[0].endswith("*** Welcome ***")
    broken = message_of(b'{"jsonrpc": "2.0", "method": "notifications/x", "params": {"a": "\xff"}}', repairs)
    assert broken.params == {"a": "�"}
    assert "bytes that are no UTF-8 were replaced" in repairs.sentences


@given(
    st.binary(max_size=60)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=6),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["jsonrpc", "id", "method", "params", "result", "error", "code", "message"]), inner, max_size=4
            )
        ),
    ).map(lambda value: json.dumps(value).encode())
)
def test_no_line_is_an_exception(line: bytes) -> None:
    message_of(line, Repairs())


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "tools",
                    "name",
                    "inputSchema",
                    "type",
                    "content",
                    "text",
                    "structuredContent",
                    "isError",
                    "capabilities",
                    "nextCursor",
                    "_meta",
                ]
            ),
            inner,
            max_size=5,
        )
    ),
)


@given(
    st.dictionaries(
        st.sampled_from(["tools", "content", "structuredContent", "isError", "nextCursor", "capabilities", "_meta"]), ANY, max_size=5
    ),
    st.sampled_from(["tools/list", "initialize"]),
    st.sampled_from([OLD, NEW]),
)
def test_whatever_a_server_lists_can_be_read(result: dict[str, Any], method: str, version: str) -> None:
    fixed = repaired_result(method, result, version, Repairs())
    beside = {"_meta", "capabilities"}  # of any form: they are not part of the list
    with suppress(KeyError):  # a method that the version does not have
        try:
            methods.validate_server_result(method, version, fixed)
        except ValidationError as error:
            wrong = {str(part["loc"][0]) for part in error.errors()}
            if not wrong <= beside:
                raise


def recorded(*results: dict[str, Any], memory: int = 4_000_000, secrets: tuple[str, ...] = ()) -> Recording:
    recording = Recording(Redactor(secrets), memory)
    for number, result in enumerate(results):
        recording.add("in", {"jsonrpc": "2.0", "id": number, "result": result})
    return recording


def test_messages_are_recorded_as_they_came_without_meta_and_secrets() -> None:
    observer = Observer(Recording(Redactor(["s3cret-value"])), Repairs())
    observer.outgoing(SessionMessage(JSONRPCRequest(jsonrpc="2.0", id=7, method="tools/call", params={"name": "x"})))
    observer.incoming(
        SessionMessage(JSONRPCResponse(jsonrpc="2.0", id=7, result={"content": "the s3cret-value", "_meta": {"icon": "x" * 9000}}))
    )
    out, back = observer.recording.frames
    assert (out.direction, out.message["method"], back.direction) == ("out", "tools/call", "in")
    assert back.message == {"jsonrpc": "2.0", "id": 7, "result": {"content": f"the {MARK}"}}  # not repaired: as it came


def test_memory_is_bounded_by_cutting_the_oldest_payloads() -> None:
    recording = recorded(*({"text": f"{number}" * 1000} for number in range(8)), memory=4_000)
    frames = recording.frames
    assert [frame.message["id"] for frame in frames] == list(range(8))
    assert [frame.cut > 0 for frame in frames] == [True] * 5 + [False] * 3
    assert frames[0].message == {"jsonrpc": "2.0", "id": 0}
    assert sum(weight_of(frame.message) for frame in frames if not frame.cut) <= 4_000


@given(ANY)
def test_the_weight_of_a_value_is_about_its_json(value: Any) -> None:
    text = len(json.dumps(value, ensure_ascii=False))
    assert text / 4 <= weight_of(value) <= 64 * text
