"""What bad input to the `/v1` routes gets: a typed error in OpenAI's form that names the parameter, and nothing recorded."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.small_registry import CONTEXT, POLICY, SmallServer, eventually, small_server

from apprentice.core.errors import InvalidRequest
from apprentice.core.server.gateway_schema import IGNORED, ChatBody
from apprentice.core.server.json_body import parse_json
from apprentice.core.server.limits import Limits

HI = [{"role": "user", "content": "hi"}]
CHAT = "/t/bad/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
MAX_BODY = 200_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallServer]:
    with small_server(tmp_path_factory.mktemp("bad"), limits=Limits(max_body_bytes=MAX_BODY)) as running:
        yield running


def send(server: SmallServer, content: bytes, path: str = CHAT, **headers: str) -> httpx.Response:
    whole = {"content-type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    return server.http.post(f"{server.url}{path}", content=content, headers=whole)


def refused(response: httpx.Response, status: int = 400, code: str = "invalid_request") -> dict[str, Any]:
    """The error of a response that must be this refusal, in OpenAI's form."""
    assert response.headers["content-type"] == "application/json", response.text
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (status, code), response.text
    assert {"message", "type", "code", "param"} <= set(error)
    assert error["message"]
    assert "\n" not in error["message"]
    return error


def chat(**body: Any) -> bytes:
    return json.dumps({"model": POLICY, "messages": HI, **body}).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"not json",
        b'{"model": "mail/agent",}',
        b"\xff\xfe{}",
        chat().replace(b"hi", b"\xff"),
        chat().replace(b"hi", b"\xed\xa0\x80"),
        chat().replace(b'"hi"', b'"\\ud800"'),
        chat().replace(b'"hi"', b'"\\udc00x"'),
        chat(temperature=0).replace(b": 0", b": NaN"),
        chat(temperature=0).replace(b": 0", b": Infinity"),
        chat(temperature=0).replace(b": 0", b": 1e999"),
        chat(seed=0).replace(b": 0", b": " + b"9" * 5000),
        b"[" * 100_000,
        chat() + b"x",
        chat().replace(b"hi", b"a\nb"),
    ],
)
def test_a_body_that_is_no_strict_json_is_refused(server: SmallServer, content: bytes) -> None:
    assert refused(send(server, content))["param"] == "body"


def test_infinity_hidden_deep_in_a_body_is_found(server: SmallServer) -> None:
    tools = json.dumps([TOOL]).replace('"object"', '"object", "maximum": 1e999').encode()
    assert refused(send(server, chat(tools=0).replace(b'"tools": 0', b'"tools": ' + tools)))["param"] == "body"


@pytest.mark.parametrize("number", ["9" * 400 + ".0", "9" * 300 + "e99", "-" + "9" * 300 + ".5E+99"])
def test_infinity_spelled_with_many_digits_is_found(server: SmallServer, number: str) -> None:
    """Where any JSON may stand, it would be stored and come back as what no JSON reader takes."""
    body = f'{{"policy": "{POLICY}", "metadata": {{"x": {number}}}}}'.encode()
    assert refused(send(server, body, "/api/trajectories"))["param"] == "body"
    origin = f'{{"extra": {{"x": {number}}}}}'
    assert refused(send(server, chat(), "/v1/chat/completions", x_apprentice_origin=origin))["param"] == "x-apprentice-origin"


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_cannot_be_applied_to_a_reply_is_told_in_the_reply(tmp_path: Path, stream: bool) -> None:
    wanted = {"type": "json_schema", "json_schema": {"schema": {"multipleOf": 0.5}}}
    with small_server(tmp_path, reply="1" + "0" * 400) as small:
        answer = send(small, chat(response_format=wanted, stream=stream))
        assert answer.status_code == 200
        assert "the reply cannot be checked" in answer.text
        assert small.ledger.counts().completions == 1


def test_a_pattern_that_would_never_end_under_backtracking_is_matched_at_once(tmp_path: Path) -> None:
    wanted = {
        "type": "json_schema",
        "json_schema": {"schema": {"$schema": "https://json-schema.org/draft/2020-12/schema", "pattern": "^(a+)+$"}},
    }
    with small_server(tmp_path, reply=json.dumps("a" * 200 + "b")) as small:
        choice = send(small, chat(response_format=wanted)).json()["choices"][0]
        assert "does not match '^(a+)+$'" in choice["parse_error"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_that_nobody_foresaw_is_told_in_the_same_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    with small_server(tmp_path) as small:
        monkeypatch.setattr(small.registry.codec, "stream", lambda *_, **__: _Breaking(broken))
        answer = send(small, chat(stream=stream))
    event = answer.text.splitlines()[-2].removeprefix("data: ") if stream else answer.text
    assert json.loads(event)["error"]["code"] == "internal_error"
    assert "[DONE]" not in answer.text


class _Breaking:
    """A reader of replies that gives one piece and then breaks."""

    def __init__(self, broken: Any) -> None:
        self.broken = broken

    def feed(self, token_ids: Any) -> list[dict[str, str]]:
        return [{"content": "x"}]

    def finish(self) -> list[dict[str, str]]:
        return self.broken()


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
def test_only_json_is_read(server: SmallServer, kind: str) -> None:
    assert refused(send(server, chat(), content_type=kind))["param"] == "content-type"


@pytest.mark.parametrize("body", [[], 5, "x", None, True])
def test_a_body_that_is_no_object_is_refused(server: SmallServer, body: Any) -> None:
    refused(send(server, json.dumps(body).encode()))


ROLE = {"role": "user"}
CASES: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model"),
    ({"model": 5}, "model"),
    ({"model": ""}, "model"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{}]}, "messages[0]"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0]"),
    ({"messages": [{"role": "function", "content": "x", "name": "f"}]}, "messages[0]"),
    ({"messages": [ROLE]}, "messages[0].content"),
    ({"messages": [{**ROLE, "content": None}]}, "messages[0].content"),
    ({"messages": [{**ROLE, "content": 5}]}, "messages[0].content"),
    ({"messages": [*HI, {**ROLE, "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages[1].content[0].type"),
    ({"messages": [{**ROLE, "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{**ROLE, "content": "x", "mood": "good"}]}, "messages[0].mood"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "type": "function"}]}]}, "messages[0].tool_calls[0].function"),
    ({"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "messages[0].function_call"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 1000}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 1.5}, "n"),
    ({"n": 10**6}, "n"),
    ({"seed": 2**63}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 10**40}, "max_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
    ({"stop": ""}, "stop"),
    ({"stop": [""]}, "stop[0]"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"more": 1}}, "stream_options.more"),
    ({"logprobs": 3}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters"),
    ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": "always"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    ({"parallel_tool_calls": False}, "parallel_tool_calls"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "wrong"}}}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"pattern": "("}}}}, "response_format.json_schema.schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"items": {"pattern": "(?=a)b"}}}}},
        "response_format.json_schema.schema",
    ),
    ({"frequency_penalty": 0.5}, "frequency_penalty"),
    ({"presence_penalty": -1}, "presence_penalty"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"functions": []}, "functions"),
    ({"tempreature": 0.5}, "tempreature"),
    ({"return_token_ids": 1}, "return_token_ids"),
]


@pytest.mark.parametrize(("change", "param"), CASES, ids=[json.dumps(change)[:60] for change, _ in CASES])
def test_each_wrong_parameter_is_named(server: SmallServer, change: dict[str, Any], param: str) -> None:
    error = refused(send(server, chat(**change)))
    assert error["param"].startswith(param), error


def test_a_missing_parameter_is_named(server: SmallServer) -> None:
    assert refused(send(server, b'{"messages": [{"role": "user", "content": "x"}]}'))["param"] == "model"
    assert refused(send(server, b'{"model": "mail/agent"}'))["param"] == "messages"


@pytest.mark.parametrize(
    "change",
    [
        {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "modalities": ["text"]},
        dict.fromkeys(IGNORED, "x"),
        {"temperature": None, "top_p": None, "n": None, "stop": None, "tools": None, "tool_choice": None, "seed": None, "logprobs": None},
    ],
)
def test_harmless_parameters_change_nothing(server: SmallServer, change: dict[str, Any]) -> None:
    assert send(server, chat(**change)).json()["choices"][0]["message"]["content"] == "Hello, world"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": [10**30]}, "prompt[0]"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"prompt": [[1, 2]]}, "prompt[0]"),
        ({"prompt": ["a", "b"]}, "prompt[0]"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"messages": HI}, "messages"),
    ],
)
def test_each_wrong_parameter_of_a_completion_is_named(server: SmallServer, change: dict[str, Any], param: str) -> None:
    body = {"model": POLICY, "prompt": [5], **change}
    assert refused(send(server, json.dumps(body).encode(), "/v1/completions"))["param"].startswith(param)


@pytest.mark.parametrize(
    "name",
    [
        "nobody",
        "mail/nobody",
        "mail/agent@7",
        "mail/agent@-1",
        "mail/agent@x",
        "../../etc/passwd",
        "mail/../mail/agent",
        "mail/agent/",
        "\x00",
    ],
)
def test_an_unknown_model_is_never_another_one(server: SmallServer, name: str) -> None:
    assert refused(send(server, chat(model=name)), 404, "model_not_found")["param"] == "model"


@pytest.mark.parametrize("asked", [{}, {"max_tokens": 5}, {"max_completion_tokens": 5}])
def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(server: SmallServer, asked: dict[str, int]) -> None:
    error = refused(send(server, chat(messages=[{"role": "user", "content": "x" * 5000}], **asked)), 400, "context_length_exceeded")
    assert error["details"]["context_length"] == CONTEXT
    assert error["details"]["prompt_tokens"] > 2500
    assert str(CONTEXT) in error["message"]
    assert str(error["details"]["prompt_tokens"]) in error["message"]


def test_more_tokens_than_the_context_has_left_are_refused_with_both_numbers(server: SmallServer) -> None:
    error = refused(send(server, chat(max_tokens=CONTEXT)), 400, "context_length_exceeded")
    assert error["param"] == "max_tokens"
    assert error["details"]["completion_tokens"] == CONTEXT


@pytest.mark.parametrize("id_", ["..%2f..%2fetc", "%2e%2e", "a%20b", "-x", "%00", "x" * 200, "%ff", "a%0a"])
def test_a_trajectory_id_that_is_no_name_is_refused(server: SmallServer, id_: str) -> None:
    response = send(server, chat(), f"/t/{id_}/v1/chat/completions")
    assert response.status_code in (400, 404)
    assert response.json()["error"]["message"]
    assert not any(trajectory.id not in ("bad",) for trajectory in server.ledger.trajectories())


@pytest.mark.parametrize("id_", ["", "a b", "../x", "x" * 129, "ä"])
def test_a_trajectory_header_that_is_no_name_is_refused(server: SmallServer, id_: str) -> None:
    response = server.http.post(
        f"{server.url}/v1/chat/completions",
        content=chat(),
        headers={"content-type": "application/json", "x-apprentice-trajectory": id_.encode("latin-1")},
    )
    assert refused(response)["param"] == "x-apprentice-trajectory"


@pytest.mark.parametrize(
    "origin", ["", "{", "[]", '{"agent": 5}', '{"mood": "x"}', '{"lineage": {"x": "y"}}', '{"attempt": NaN}', '{"agent": "\\ud800"}']
)
def test_an_origin_that_is_none_is_refused(server: SmallServer, origin: str) -> None:
    assert refused(send(server, chat(), "/v1/chat/completions", x_apprentice_origin=origin))["param"] == "x-apprentice-origin"


def test_a_body_over_the_limit_is_refused_before_it_is_read(server: SmallServer) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {10**12}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=20) as connection:
        connection.sendall(head.encode())
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"payload_too_large" in answer


def sent_raw(server: SmallServer, data: bytes) -> bytes:
    """What the server answers to these bytes on a connection of their own."""
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=20) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(65536), b""))


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


@pytest.mark.parametrize(
    "data",
    [
        b"GARBAGE\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nhost: localhost\r\n\r\n",
        HEAD + b"content-length: abc\r\n\r\n",
        HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello",
        HEAD + b"transfer-encoding: chunked\r\n\r\nZZ\r\n",
    ],
)
def test_what_is_no_http_is_refused_in_the_same_form(server: SmallServer, data: bytes) -> None:
    head, _, body = sent_raw(server, data).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert json.loads(body)["error"]["code"] == "invalid_request"
    assert send(server, chat()).status_code == 200


def test_a_client_that_leaves_while_it_sends_its_body_is_no_failure(server: SmallServer, caplog: pytest.LogCaptureFixture) -> None:
    sent_raw(server, HEAD + b"content-length: 100\r\n\r\n{")
    gone = 'status="499"'
    eventually(lambda: gone in server.http.get("/metrics").text)
    assert "failed unexpectedly" not in caplog.text


def test_a_line_break_in_a_name_does_not_break_the_sentence(server: SmallServer) -> None:
    refused(send(server, chat(model="a\nb\u2028c")), 404, "model_not_found")


def test_a_body_of_unknown_length_is_cut_off_at_the_limit(server: SmallServer) -> None:
    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        while sent < 100 * MAX_BODY:
            sent += 10_000
            yield b" " * 10_000

    try:
        response = server.http.post(f"{server.url}{CHAT}", content=endless(), headers={"content-type": "application/json"})
    except httpx.TransportError:  # the server closed the connection while the body was still being sent
        assert sent < 100 * MAX_BODY
    else:
        error = refused(response, 413, "payload_too_large")
        assert error["details"]["limit_bytes"] == MAX_BODY
    assert send(server, chat()).status_code == 200


def test_a_body_just_within_the_limit_is_read(server: SmallServer) -> None:
    body = chat()
    assert send(server, body + b" " * (MAX_BODY - len(body))).status_code == 200
    refused(send(server, body + b" " * (MAX_BODY - len(body) + 1)), 413, "payload_too_large")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("PUT", "/api/trajectories", 405),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/", 404),
        ("GET", "/v1/../../etc/passwd", 404),
        ("GET", "/t/x/v2/models", 404),
    ],
)
def test_a_wrong_method_or_path_is_an_error_in_the_same_form(server: SmallServer, method: str, path: str, status: int) -> None:
    response = server.http.request(method, f"{server.url}{path}")
    assert response.status_code == status
    assert set(response.json()["error"]) >= {"message", "type", "code", "param"}
    assert ("allow" in response.headers) == (status == 405)


def test_nothing_of_all_this_was_recorded(server: SmallServer) -> None:
    before = server.ledger.counts().completions
    for content in (b"{", chat(mood=1), chat(model="nobody"), chat(max_tokens=CONTEXT)):
        assert send(server, content, "/t/unrecorded/v1/chat/completions").status_code in (400, 404)
    assert server.ledger.counts().completions == before


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FIELDS = st.sampled_from([*ChatBody.model_fields])


@given(st.dictionaries(FIELDS, JSON, min_size=1, max_size=3))
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_value_of_any_parameter_breaks_the_server(server: SmallServer, change: dict[str, Any]) -> None:
    response = send(server, chat(**change))
    assert response.status_code < 500, response.text


@given(
    JSON,
    st.sampled_from(["role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"]),
    st.sampled_from(["user", "assistant", "tool"]),
)
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_message_breaks_the_server(server: SmallServer, value: Any, field: str, role: str) -> None:
    message = {"role": role, "content": "x", "tool_call_id": "c", field: value}
    if role != "tool" and field != "tool_call_id":
        del message["tool_call_id"]
    assert send(server, chat(messages=[*HI, message])).status_code < 500


@given(JSON)
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_tool_schema_breaks_the_server(server: SmallServer, parameters: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    assert send(server, chat(tools=tools)).status_code < 500


@given(JSON)
def test_any_json_that_python_writes_is_read_as_it_was_meant(value: Any) -> None:
    assert parse_json(json.dumps(value).encode()) == value


@given(st.binary(max_size=40))
def test_any_bytes_are_json_or_refused_in_one_sentence(content: bytes) -> None:
    try:
        value = parse_json(content)
    except InvalidRequest as error:
        refusal = str(error)
    else:
        refusal = ""
        assert json.loads(content) == value
    assert "\n" not in refusal
