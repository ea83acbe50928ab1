"""What the gateway costs: time per call, 2,000 rollouts open at once, and requests per second beside the LiteLLM proxy.

    .venv/bin/python benchmarks/gateway_overhead.py [--quick] [--no-litellm]

All servers are processes of their own on loopback and all replies come from an engine that answers at once: no model is run.

- `p50_added_ms`: median time of one call through the gateway (validation, rendering and splicing, admission, engine, ledger
  commit, reply) minus the median of the same client against a bare uvicorn + Starlette endpoint that reads the same body and
  answers constant bytes. Same requests, alternating rounds, one keep-alive connection.
- `errors`: of 2,000 rollouts, each with its own connection and trajectory, two calls each; the second starts when all
  2,000 have had their first, so all are open together.
- `ratio_litellm`: requests per second with 32 connections, ours over those of the LiteLLM proxy (one worker, as ours) in
  front of the same null engine behind a bare endpoint in OpenAI's form. LiteLLM is installed into a virtual environment of
  its own under ~/.cache/apprentice-bench on first use; where that is impossible the ratio is null.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[1]
CACHE = Path(os.environ.get("APPRENTICE_BENCH_CACHE", Path.home() / ".cache" / "apprentice-bench"))
POLICY = "mail/agent"
ROLLOUTS = 2000
REPLY_TOKENS = 16
KEY = os.environ.setdefault("LITELLM_MASTER_KEY", f"sk-{secrets.token_hex(24)}")
"""Of our server and of the proxy: both check it. Passed on in the environment."""


# ---- the three servers -------------------------------------------------------------------------------------------------


def serve_gateway(folder: Path) -> None:
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from support.small_registry import BASE_NAME, CONTEXT, SmallRegistry
    from support.tiny_models import tiny_tokenizer

    from apprentice.core.engines.memory import ScriptedEngine
    from apprentice.core.server.app import create_app, serve
    from apprentice.core.server.auth import Auth
    from apprentice.core.server.ledger import Ledger
    from apprentice.core.wire import RegisterModel

    async def main() -> None:
        tokenizer = tiny_tokenizer()
        ids = [*tokenizer.encode("x" * REPLY_TOKENS, add_special_tokens=False)[: REPLY_TOKENS - 1], tokenizer.eos_token_id]
        engine = ScriptedEngine(lambda *_: ids, tokenizer=tokenizer, context_length=CONTEXT, tokens_per_chunk=REPLY_TOKENS)
        with Ledger.open(folder / "ledger.sqlite") as ledger:
            registry = SmallRegistry(engine, ledger, tokenizer)
            await registry.register(RegisterModel(project="mail", name="agent", base_model=BASE_NAME))
            app = create_app(registry, ledger, auth=Auth.for_bind("127.0.0.1", KEY))
            await serve(app, "127.0.0.1", 0, _announce)

    asyncio.run(main())


def serve_bare(openai: bool) -> None:
    """Constant bytes; with `openai` the null engine is really asked and the reply is in OpenAI's form."""
    sys.path.insert(0, str(ROOT))
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    from apprentice.core.engines.memory import NullEngine
    from apprentice.core.engines.protocol import BASE
    from apprentice.core.records import SamplingParams
    from apprentice.core.server.app import serve

    engine = NullEngine(length=REPLY_TOKENS)
    message = {"role": "assistant", "content": "x" * REPLY_TOKENS}
    reply = {
        "id": "chatcmpl-0",
        "object": "chat.completion",
        "created": 0,
        "model": "null",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": REPLY_TOKENS, "total_tokens": 1 + REPLY_TOKENS},
    }
    body = json.dumps(reply).encode()

    async def answer(request: Request) -> Response:
        await request.body()
        if openai:
            async for _ in engine.generate([1], SamplingParams(), BASE):
                pass
        return Response(body, media_type="application/json")

    app = Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])])
    asyncio.run(serve(app, "127.0.0.1", 0, _announce))


def _announce(port: int) -> None:
    print(f"PORT {port}", flush=True)


@contextmanager
def child(*arguments: str) -> Iterator[str]:
    """The URL of a server started from this file; ended on exit."""
    process = subprocess.Popen([sys.executable, str(Path(__file__).resolve()), *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("PORT "):
                yield f"http://127.0.0.1:{line.split()[1]}"
                break
        else:
            raise RuntimeError(f"{' '.join(arguments)} did not start (exit code {process.wait()})")
    finally:
        process.terminate()
        process.wait(30)


# ---- LiteLLM -----------------------------------------------------------------------------------------------------------


def litellm_python() -> Path | None:
    """The interpreter of LiteLLM's own environment, which is made on first use; None where it cannot be."""
    home = CACHE / "litellm"
    python, command = home / "bin" / "python", home / "bin" / "litellm"
    if command.exists():
        return python
    try:
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "litellm[proxy]"], check=True)
    except (OSError, subprocess.CalledProcessError) as cause:
        print(f"LiteLLM could not be installed: {cause}", file=sys.stderr)
        return None
    return python if command.exists() else None


@contextmanager
def litellm_proxy(python: Path, backend: str, folder: Path) -> Iterator[str]:
    """The proxy with its default settings, no data base and no logging, in front of `backend`."""
    config = folder / "litellm.yaml"
    config.write_text(
        json.dumps(
            {
                "model_list": [
                    {
                        "model_name": POLICY,
                        "litellm_params": {"model": "openai/null", "api_base": f"{backend}/v1", "api_key": secrets.token_hex()},
                    }
                ],
                "litellm_settings": {"telemetry": False},
            }
        )
    )
    port = _free_port()
    log = (folder / "litellm.log").open("w")
    environment = {**os.environ, "LITELLM_LOG": "ERROR", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MODE": "PRODUCTION"}
    command = [str(python.parent / "litellm"), "--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
    process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=folder)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_for(f"{url}/health/liveliness", process, folder / "litellm.log")
        yield url
    finally:
        process.terminate()
        process.wait(30)
        log.close()


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(url, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    raise RuntimeError(f"the LiteLLM proxy did not come up: {log.read_text()[-2000:]}")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


# ---- measurements ------------------------------------------------------------------------------------------------------


HEADERS = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}


def body_of(turn: int = 0) -> bytes:
    messages = [{"role": "system", "content": "You are an agent that answers mail. " * 8}, {"role": "user", "content": f"Question {turn}?"}]
    return json.dumps({"model": POLICY, "messages": messages, "max_tokens": 64, "temperature": 1.0}).encode()


def call_times(url: str, calls: int) -> list[float]:
    """Milliseconds of each call over one keep-alive connection, each in a trajectory of four calls."""
    times: list[float] = []
    with httpx.Client(base_url=url, trust_env=False) as client:
        trajectory = ""
        for turn in range(calls + 10):
            if turn % 4 == 0:
                trajectory = f"trj-{secrets.token_hex(8)}"
            headers = {**HEADERS, "x-apprentice-trajectory": trajectory}
            started = time.perf_counter()
            response = client.post("/v1/chat/completions", content=body_of(turn), headers=headers)
            times.append((time.perf_counter() - started) * 1000)
            if response.status_code != 200:
                raise RuntimeError(f"{url} answered {response.status_code}: {response.text}")
    return times[10:]


def added_ms(gateway: str, bare: str, rounds: int, calls: int) -> tuple[float, float]:
    through: list[float] = []
    direct: list[float] = []
    for _ in range(rounds):
        direct += call_times(bare, calls)
        through += call_times(gateway, calls)
    return statistics.median(through), statistics.median(direct)


class Connection:
    """A minimal HTTP/1.1 client on one connection, so that the client does not become what is measured."""

    def __init__(self, url: str) -> None:
        self._host, _, port = url.removeprefix("http://").partition(":")
        self._port = int(port)

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection(self._host, self._port)

    async def post(self, path: str, body: bytes) -> int:
        headers = {"host": self._host, **HEADERS, "content-length": str(len(body))}
        head = f"POST {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in headers.items()) + "\r\n"
        self._writer.write(head.encode() + body)
        lines = (await self._reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
        headers = dict(line.lower().split(b": ", 1) for line in lines[1:] if line)
        await self._reader.readexactly(int(headers[b"content-length"]))
        return int(lines[0].split()[1])

    def close(self) -> None:
        self._writer.close()


async def open_rollouts(url: str, count: int) -> int:
    """Errors of `count` rollouts that are open together."""
    first_done = asyncio.Barrier(count)
    errors = 0

    async def rollout(index: int) -> None:
        nonlocal errors
        connection = Connection(url)
        path = f"/t/open-{index}-{secrets.token_hex(4)}/v1/chat/completions"
        try:
            await connection.open()
            ok = await connection.post(path, body_of()) == 200
        except (OSError, asyncio.IncompleteReadError) as cause:
            print(f"rollout {index}: {cause!r}", file=sys.stderr)
            ok = False
        await first_done.wait()
        if ok:
            try:
                ok = await connection.post(path, body_of(1)) == 200
            except (OSError, asyncio.IncompleteReadError) as cause:
                print(f"rollout {index}: {cause!r}", file=sys.stderr)
                ok = False
            connection.close()
        errors += not ok

    await asyncio.gather(*(rollout(index) for index in range(count)))
    return errors


async def requests_per_second(url: str, seconds: float, connections: int = 32) -> float:
    path = "/v1/chat/completions"
    done = 0
    started = time.perf_counter()

    async def worker() -> None:
        nonlocal done
        connection = Connection(url)
        await connection.open()
        while time.perf_counter() - started < seconds:
            status = await connection.post(path, body_of())
            if status != 200:
                raise RuntimeError(f"{url} answered {status}")
            done += 1
        connection.close()

    await asyncio.gather(*(worker() for _ in range(connections)))
    return done / (time.perf_counter() - started)


def throughput(urls: list[str], rounds: int, seconds: float) -> list[float]:
    """Medians over alternating rounds, after one round to warm up."""
    measured: list[list[float]] = [[] for _ in urls]
    for round_ in range(rounds + 1):
        for place, url in zip(measured, urls, strict=True):
            rate = asyncio.run(requests_per_second(url, seconds if round_ else 1.0))
            if round_:
                place.append(rate)
    return [statistics.median(place) for place in measured]


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost of the gateway with a null engine.")
    parser.add_argument("--quick", action="store_true", help="fewer calls")
    parser.add_argument("--no-litellm", action="store_true", help="leave the comparison out")
    parser.add_argument("--serve", choices=["gateway", "bare", "openai"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve == "gateway":
        serve_gateway(options.folder)
    elif options.serve:
        serve_bare(options.serve == "openai")
    else:
        measure(options.quick, not options.no_litellm)


def measure(quick: bool, with_litellm: bool) -> None:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gateway-overhead-")))
        gateway = stack.enter_context(child("--serve", "gateway", "--folder", str(folder)))
        bare = stack.enter_context(child("--serve", "bare"))
        through, direct = added_ms(gateway, bare, 2 if quick else 5, 100 if quick else 300)
        print(f"one call: {through:.2f} ms through the gateway, {direct:.2f} ms bare (medians)")
        errors = asyncio.run(open_rollouts(gateway, ROLLOUTS))
        print(f"{ROLLOUTS} rollouts open at once: {errors} errors")
        rates = _beside_litellm(stack, gateway, folder, quick) if with_litellm else None
    result = {
        "p50_added_ms": round(through - direct, 3),
        "p50_ms": round(through, 3),
        "p50_bare_ms": round(direct, 3),
        "errors": errors,
        "rollouts": ROLLOUTS,
        "ratio_litellm": round(rates[0] / rates[1], 2) if rates else None,
        "requests_per_second": round(rates[0], 1) if rates else None,
        "requests_per_second_litellm": round(rates[1], 1) if rates else None,
    }
    print(json.dumps(result))


def _beside_litellm(stack: ExitStack, gateway: str, folder: Path, quick: bool) -> list[float] | None:
    python = litellm_python()
    if python is None:
        return None
    backend = stack.enter_context(child("--serve", "openai"))
    proxy = stack.enter_context(litellm_proxy(python, backend, folder))
    rates = throughput([gateway, proxy], 1 if quick else 3, 3.0 if quick else 5.0)
    print(f"requests per second with 32 connections: {rates[0]:.0f} here, {rates[1]:.0f} LiteLLM proxy")
    return rates


if __name__ == "__main__":
    main()
