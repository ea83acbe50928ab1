"""Who may call: keys, binds, and web pages that try to reach a server on this machine."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.small_registry import SmallServer, small_server

from apprentice.core.errors import ConfigError
from apprentice.core.server.auth import Auth, is_loopback

KEY = "a-long-enough-key-0123456789"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallServer]:
    with small_server(tmp_path_factory.mktemp("guarded"), key=KEY) as running:
        yield running


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "gpu-box", ""])
def test_a_bind_that_others_can_reach_needs_a_key(host: str) -> None:
    with pytest.raises(ConfigError, match="needs an API key"):
        Auth.for_bind(host, None)
    assert Auth.for_bind(host, KEY).key_sha256 is not None


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "::1", "[::1]"])
def test_loopback_may_be_open(host: str) -> None:
    assert is_loopback(host)
    assert Auth.for_bind(host, None).key_sha256 is None


@pytest.mark.parametrize(
    ("key", "word"),
    [
        ("", "at least 16"),
        ("short", "at least 16"),
        ("x" * 15, "has 15"),
        ("schlüssel-schlüssel", "ASCII"),
        ("a key with some spaces", "spaces"),
    ],
)
def test_a_key_that_is_too_short_or_cannot_travel_in_a_header_is_refused(key: str, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        Auth.for_bind("127.0.0.1", key)


def test_the_key_itself_is_not_kept() -> None:
    assert KEY not in repr(Auth.for_bind("127.0.0.1", KEY))


@pytest.mark.parametrize(
    "header", [None, "", KEY, f"Basic {KEY}", "Bearer", "Bearer wrong-key-0123456789", f"Bearer {KEY}x", "Bearer schl\xfcssel"]
)
def test_without_the_key_nothing_is_answered(guarded: SmallServer, header: str | None) -> None:
    headers = {} if header is None else {"authorization": header.encode("latin-1")}
    response = guarded.http.get(f"{guarded.url}/v1/models", headers=headers)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"


def test_with_the_key_everything_is(guarded: SmallServer) -> None:
    for scheme in ("Bearer", "bearer"):
        assert guarded.http.get(f"{guarded.url}/v1/models", headers={"authorization": f"{scheme} {KEY}"}).status_code == 200


def test_every_route_needs_the_key(guarded: SmallServer) -> None:
    paths = {**guarded.app.openapi()["paths"], "/docs": {"get": {}}, "/openapi.json": {"get": {}}, "/nothing": {"get": {}}}
    assert len(paths) > 15
    for path, methods in paths.items():
        for method in methods:
            filled = re.sub(r"\{[^}]*\}", "1", path)
            response = guarded.http.request(method.upper(), f"{guarded.url}{filled}")
            assert response.status_code == 401, f"{method} {path}"


def test_no_key_is_ever_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), small_server(tmp_path, key=KEY) as server:
        server.http.get(f"{server.url}/v1/models", headers={"authorization": f"Bearer {KEY}"})
        server.http.get(f"{server.url}/v1/models", headers={"authorization": "Bearer not-the-right-key"})
    server_side = [record.getMessage() for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))]
    assert not any(KEY in message or "not-the-right-key" in message for message in server_side)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "localhost:1"}, 200),
        ({"host": "127.0.0.1"}, 200),
        ({"host": "[::1]:80"}, 200),
        ({"host": "attacker.example"}, 401),
        ({"host": "127.0.0.1.attacker.example"}, 401),
        ({"host": "[::1"}, 401),
        ({"origin": "http://localhost:3000"}, 200),
        ({"origin": "https://attacker.example"}, 401),
        ({"origin": "null"}, 401),
    ],
)
def test_an_open_server_on_loopback_answers_no_web_page_of_others(tmp_path: Path, headers: dict[str, str], status: int) -> None:
    with small_server(tmp_path) as server:
        assert server.http.get(f"{server.url}/health", headers=headers).status_code == status


def test_a_server_with_a_key_may_be_called_by_any_name(guarded: SmallServer) -> None:
    headers = {"authorization": f"Bearer {KEY}", "host": "gpu-box:7474"}
    assert guarded.http.get(f"{guarded.url}/health", headers=headers).status_code == 200
