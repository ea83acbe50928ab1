"""What a result comes to: the text a model is shown, and the outcome. Both sides of the line between failure and result."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apprentice.integrations.mcp.failures import reported_failure
from apprentice.integrations.mcp.results import cap_text, outcome_of, reply_of, result_text


def text(*parts: str) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": part} for part in parts]}


def test_text_blocks_are_joined_and_meta_is_left_out() -> None:
    result: Any = {**text("one", "two"), "_meta": {"io.modelcontextprotocol/serverInfo": {"icon": "x" * 8000}}}
    reply = reply_of(result, server="s", tool="t", arguments={"a": 1}, seconds=0.5, notes=["odd"], function="s__t")
    assert (reply.text, reply.full_text, reply.outcome) == ("one\ntwo", "one\ntwo", "ok")
    assert (reply.server, reply.tool, reply.arguments, reply.seconds, reply.notes, reply.function) == (
        "s",
        "t",
        {"a": 1},
        0.5,
        ("odd",),
        "s__t",
    )
    assert not reply.truncated


def test_a_structured_value_is_shown_only_if_nothing_else_is() -> None:
    structured: Any = {"structuredContent": {"zone": "été"}}
    assert result_text({"content": [], **structured}) == '{"zone": "été"}'
    assert result_text(structured) == '{"zone": "été"}'
    assert result_text({**text("{...}"), **structured}) == "{...}"
    assert reply_of({**text("x"), **structured}, server="s", tool="t", arguments=None).structured == {"zone": "été"}


def test_pictures_sounds_and_files_are_placeholders_with_type_size_and_hash() -> None:
    raw = b"\x89PNG" * 1400
    data, digest = base64.b64encode(raw).decode(), hashlib.sha256(raw).hexdigest()[:12]
    content: list[Any] = [
        {"type": "image", "data": data, "mimeType": "image/png"},
        {"type": "audio", "data": "not base64!", "mimeType": "audio/wav"},
        {"type": "resource", "resource": {"uri": "file:///a.zip", "blob": data}},
        {"type": "resource", "resource": {"uri": "file:///a.txt", "text": "inside"}},
        {"type": "resource_link", "uri": "file:///b.txt", "name": "b", "mimeType": "text/plain"},
        {"type": "hologram", "beam": 3, "_meta": {"x": 1}},
        "no block",
    ]
    lines = result_text({"content": content}).split("\n")
    assert lines == [
        f"[image image/png, 5.6 kB, sha256 {digest}]",
        f"[audio audio/wav, 11 bytes, sha256 {hashlib.sha256(b'not base64!').hexdigest()[:12]}]",
        f"[file file:///a.zip of unknown type, 5.6 kB, sha256 {digest}]",
        "inside",
        "[link file:///b.txt (b, text/plain)]",
        '{"type": "hologram", "beam": 3}',
    ]


def test_results_that_are_no_results_have_a_text_too() -> None:
    assert result_text({}) == ""
    assert result_text({"content": "plain"}) == "plain"
    assert result_text({"content": {"type": "text", "text": "one block"}}) == "one block"


def test_resources_and_prompts_are_documents_whose_text_is_no_report() -> None:
    document: Any = {"contents": [{"uri": "file:///log", "text": "Error: disk full"}]}
    assert (result_text(document), outcome_of(document)) == ("Error: disk full", "ok")
    prompt: Any = {"messages": [{"role": "user", "content": {"type": "text", "text": "Error: why?"}}]}
    assert (result_text(prompt), outcome_of(prompt)) == ("user: Error: why?", "ok")


def test_a_long_text_keeps_its_head_and_tail_and_says_how_much_is_missing() -> None:
    long = "a" * 6_000 + "b" * 6_000
    cut = cap_text(long, 4_000)
    assert len(cut) <= 4_000
    assert cut.startswith("a" * 2_000)
    assert cut.endswith("b" * 1_000)
    missing = len(long) - cut.count("a") - cut.count("b") + "characters left out".count("a")
    assert f"[{missing:,} characters left out]" in cut
    reply = reply_of(text(long), server="s", tool="t", arguments=None)
    assert reply.full_text == long
    assert reply.truncated
    assert len(reply.text) <= 4_000


@given(st.text(max_size=400), st.integers(60, 300))
def test_a_capped_text_is_never_longer_than_the_cap_nor_changed_within_it(value: str, limit: int) -> None:
    cut = cap_text(value, limit)
    assert len(cut) <= limit
    assert cut == value or (len(value) > limit and cut[:5] == value[:5] and cut[-5:] == value[-5:])


FAILURES = [
    "Error",
    "Error: division by zero",
    "error - file is locked",
    "ERROR!",
    "❌ Something is off",
    "**Error:** no access",
    "[ERROR] quota exceeded",
    "Database error: no such table: cities",
    'Database error: near "SELEC": syntax error',
    "Error executing tool boom",
    "Error executing tool boom: kaboom",
    "Error while reading file: x",
    "Error reading image",
    "Error (404): gone",
    "HTTP error 500",
    "MCP error -32602: Input validation error",
    "ValueError: unsupported operand",
    "sqlite3.OperationalError: no such column: x",
    "An error occurred while processing the request.",
    "Traceback (most recent call last):\n  File \"a.py\", line 1\nKeyError: 'x'",
    "Access denied - path outside allowed directories: /etc/passwd not in /tmp/x",
    "Permission denied",
    "Security violation: '..' is not allowed",
    "Failed to fetch https://example.com",
    "Failed: timeout",
    "Unable to open the database",
    "Could not find the page you asked for.",
    "Cannot divide by zero",
    "Invalid timezone: Mars/Olympus",
    "Invalid or unsupported argument",
    "Unknown tool: nope",
    "Missing required parameter 'city'",
    "No such file or directory: a.txt",
    "ENOENT: no such file or directory, open 'x'",
    "Only SELECT queries are allowed for read_query",
    "Entity with name Bob not found",
    "The table 'cities' does not exist.",
    "Key 'a' not found in config.json",
    "File not found: a.txt",
    "404 Not Found",
    "Unauthorized",
    '{"error": "no such city"}',
    '{"error": {"code": 3, "message": "x"}}',
    '{"isError": true, "message": "x"}',
    '{"success": false, "message": "x"}',
    '{"errors": [{"message": "bad query"}], "data": null}',
    '[{"error": "a"}, {"error": "b"}]',
]

RESULTS = [
    "",
    "42",
    "0 errors, 0 warnings",
    "Errors: 0",
    "Error: 0",
    "Absolute error: 0.02",
    "Error rate: 3 %",
    "Error handling in Python\n\nUse try and except.",
    "The word error occurs twice in this file.",
    "# Notes\n\nError: is what the printer says when the paper is out. Then open the tray.\n",
    "I did not find any error in your text",
    "Wrote 12 bytes to error.log",
    "def f():\n    raise ValueError('x')  # file not found\n",
    "ERROR 2024-01-02 disk full\nINFO 2024-01-02 retrying\nERROR 2024-01-02 disk full\n",
    "[ERROR] a: b\n[INFO] c: d\n[ERROR] e: f",
    "No matches found",
    "No results found for 'error'",
    "Created table errors",
    "Deleted. It does not exist any more",
    "404 rows",
    "Missing values: 3",
    "Invalid entries removed: 3",
    "Failed tests: 0",
    "Unknown: 3, known: 4",
    '{"error": null, "result": 3}',
    '{"error": "", "rows": []}',
    '{"error": "none", "rows": []}',
    '{"mean": 1.0, "error": 0.02}',
    '{"success": true, "error": "retried once"}',
    '{"errors": [], "data": {"a": 1}}',
    '{"message": "error is a word"}',
    '[{"error": "a"}, {"name": "b"}]',
    "[]",
    "{broken json",
    "If the file is not found, a new one is made",
    "Error: " + "a very long report " * 200,
]


@pytest.mark.parametrize("value", FAILURES)
def test_a_plain_failure_under_a_success_flag_is_recognised(value: str) -> None:
    assert outcome_of(text(value)) == "reported_failure"


@pytest.mark.parametrize("value", RESULTS)
def test_a_normal_result_is_not_taken_for_a_failure(value: str) -> None:
    assert outcome_of(text(value)) == "ok"


def test_a_structured_error_counts_and_the_servers_own_flag_goes_first() -> None:
    assert outcome_of({**text("done"), "structuredContent": {"error": "disk full"}}) == "reported_failure"
    assert outcome_of({**text("all is well"), "isError": True}) == "tool_error"
    assert outcome_of({**text("Error: x"), "isError": True}) == "tool_error"
    assert outcome_of({**text("fine"), "isError": False}) == "ok"


@given(st.text(max_size=300))
def test_any_text_is_judged(value: str) -> None:
    assert reported_failure(value) in (True, False)
