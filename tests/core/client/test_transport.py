"""Retries, admission and event loops of the client's HTTP, against a real server that misbehaves on demand."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.client_server import QUICK, ClientServer, client_server

from apprentice.core.client.api import ControlApi, checked_name
from apprentice.core.client.backends import RemoteBackend
from apprentice.core.client.transport import Limits, LoopTransport, RetryPolicy, Transport, environment_proxy, parse_url
from apprentice.core.errors import AuthenticationError, ConfigError, InvalidRequest, NotFound, QueueFull, ServerUnavailable, UnknownJob


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientServer]:
    with client_server(tmp_path_factory.mktemp("transport")) as running:
        yield running


@pytest.mark.parametrize("fault", ["refuse_503", "refuse_429", "lose_request", "lose_answer"])
async def test_a_busy_or_lost_request_is_sent_again(server: ClientServer, fault: str) -> None:
    transport = Transport(server.url, None, retry=QUICK)
    server.faults.add("GET", "/health", fault, times=3)  # type: ignore[arg-type]
    before = server.faults.seen.count("GET /health")
    assert (await ControlApi(transport).health()).status == "ready"
    assert server.faults.seen.count("GET /health") - before == 4
    await transport.aclose()


async def test_retries_end_with_the_servers_own_error(server: ClientServer) -> None:
    transport = Transport(server.url, None, retry=RetryPolicy(attempts=3, first_seconds=0.01))
    server.faults.add("GET", "/health", "refuse_429", times=3)
    with pytest.raises(QueueFull, match="too busy"):
        await ControlApi(transport).health()
    assert not server.faults.planned
    await transport.aclose()


async def test_a_request_that_may_have_run_is_not_repeated_if_it_is_not_idempotent(server: ClientServer) -> None:
    transport = Transport(server.url, None, retry=QUICK)
    server.faults.add("GET", "/health", "lose_answer", times=2)
    with pytest.raises(ServerUnavailable):
        await transport.request("GET", "/health", idempotent=False)
    assert len(server.faults.planned) == 1
    server.faults.planned.clear()
    await transport.aclose()


async def test_a_user_error_comes_back_as_its_own_class_and_is_not_retried(server: ClientServer) -> None:
    transport = Transport(server.url, None, retry=QUICK)
    before = len(server.faults.seen)
    with pytest.raises(UnknownJob):
        await ControlApi(transport).job("job-none")
    assert len(server.faults.seen) == before + 1
    await transport.aclose()


async def test_nobody_listening_is_named_with_the_address() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    transport = Transport(url, None, retry=RetryPolicy(attempts=2, first_seconds=0.01))
    with pytest.raises(ServerUnavailable, match=url):
        await transport.request("GET", "/health")
    await transport.aclose()


async def test_the_reason_for_a_dead_server_is_raised_at_once() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    transport = Transport(url, None, diagnose=lambda: ServerUnavailable("the child ended with exit code 7"))
    with pytest.raises(ServerUnavailable, match="exit code 7"):
        await transport.request("GET", "/health")
    await transport.aclose()


async def test_a_server_that_is_not_apprentice_is_recognised(server: ClientServer) -> None:
    async def page(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 6\r\nconnection: close\r\n\r\n<html>")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(page, "127.0.0.1", 0) as other:
        transport = Transport(f"http://127.0.0.1:{other.sockets[0].getsockname()[1]}", None, retry=QUICK)
        with pytest.raises(Exception, match="is it an Apprentice server") as caught:
            await ControlApi(transport).health()
        assert not isinstance(caught.value, NotFound)
        await transport.aclose()


async def test_a_missing_key_is_an_authentication_error(tmp_path: Path) -> None:
    from support.small_registry import small_server

    with small_server(tmp_path, key="k" * 20) as locked:
        transport = Transport(locked.url, "wrong" * 5, retry=QUICK)
        with pytest.raises(AuthenticationError):
            await ControlApi(transport).model("mail/agent")
        await transport.aclose()
        right = Transport(locked.url, "k" * 20, retry=QUICK)
        assert (await ControlApi(right).model("mail/agent")).policy == "mail/agent"
        await right.aclose()


async def test_more_requests_than_connections_wait_and_all_succeed(server: ClientServer) -> None:
    transport = Transport(server.url, None, limits=Limits(connections=6, shard_size=4), retry=RetryPolicy(attempts=1))
    server.faults.most_open, server.faults.gather_first = 0, 6
    server.faults.gathered.clear()
    answers = await asyncio.gather(*(transport.request("GET", "/api/models") for _ in range(200)))
    assert len(answers) == 200
    assert server.faults.most_open == 6
    await transport.aclose()


async def test_cancelled_requests_give_their_slots_back(server: ClientServer) -> None:
    transport = Transport(server.url, None, limits=Limits(connections=2, shard_size=2), retry=QUICK)
    for _ in range(5):
        tasks = [asyncio.create_task(transport.request("GET", "/health")) for _ in range(6)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    async with asyncio.timeout(10):
        await asyncio.gather(*(transport.request("GET", "/health") for _ in range(4)))
    await transport.aclose()


def test_one_client_works_in_one_event_loop_after_another_and_leaves_nothing_open(server: ClientServer) -> None:
    pool = LoopTransport(parse_url(server.url))
    client = httpx.AsyncClient(transport=pool, trust_env=False)

    async def ask() -> int:
        return (await client.get(f"{server.url}/health")).status_code

    assert [asyncio.run(ask()) for _ in range(3)] == [200, 200, 200]


@pytest.mark.filterwarnings("error::ResourceWarning")
def test_a_loop_that_ends_closes_its_connections(server: ClientServer) -> None:
    import gc

    async def ask() -> None:
        await Transport(server.url, None).request("GET", "/health")

    asyncio.run(ask())
    gc.collect()


@pytest.mark.parametrize("url", ["", "ftp://x", "host:7474", "http://", "//x"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="http://host:7474"):
        parse_url(url)


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/", " http://h:1 "])
def test_addresses_are_brought_to_one_form(url: str) -> None:
    assert str(parse_url(url)) == "http://h:1"


def test_a_proxy_of_the_environment_is_used_for_others_and_never_for_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:3128")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    proxy = environment_proxy(httpx.URL("http://gpu-box:7474"))
    assert proxy is not None
    assert proxy.url.host == "proxy"
    for host in ("127.0.0.1", "localhost", "[::1]"):
        assert environment_proxy(httpx.URL(f"http://{host}:7474")) is None


@pytest.mark.parametrize("name", ["", "../x", "a/b", "a\n", "\ud800", "x" * 129])
def test_an_id_that_is_no_name_never_reaches_a_path(name: str) -> None:
    with pytest.raises(InvalidRequest, match="an id has letters"):
        checked_name(name)


@pytest.mark.parametrize("key", ["ä" * 20, "\ud800", "a-key\n"])
def test_a_key_that_no_header_can_carry_is_refused_before_anything_is_sent(key: str) -> None:
    with pytest.raises(ConfigError, match="printable ASCII"):
        RemoteBackend("http://127.0.0.1:7474", api_key=key)


@pytest.mark.parametrize("key", ["\ud800", "a b", "x" * 201, "line\n"])
async def test_an_idempotency_key_that_no_header_can_carry_is_refused(server: ClientServer, key: str) -> None:
    model = await server.model()
    with pytest.raises(InvalidRequest, match="an idempotency key has"):
        await model.train_sft([{"messages": []}], idempotency_key=key, progress=False)
