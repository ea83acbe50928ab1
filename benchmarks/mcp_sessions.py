"""What MCP sessions cost beside the bare SDK: time per tool call, time to start many, and what 200 rollouts leave behind.

    .venv/bin/python benchmarks/mcp_sessions.py [--quick]

The server is the real mcp-server-time, a Python server, installed on first use in an environment of its own.

- `p50_added_ms`: median time of one call through an environment (names, schema check, recording, repair, redaction, outcome) minus
  the median of the same call through the bare SDK's client. Each has its own process of the same server; calls alternate.
- `start_ratio`: time until 16 isolated sessions are connected and have listed their tools, over that of 16 bare clients started
  together; the median of alternating rounds.
- `leaked`: after 200 rollouts in a row on a server that leaves a child process behind in each: processes and files that are still
  there, open descriptors more than after the first 20, and MiB of memory more than 8 over those after the first 20.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from apprentice.integrations.mcp.environment import SessionPool  # noqa: E402
from apprentice.integrations.mcp.spec import McpServer  # noqa: E402

ARGUMENTS = {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"}
SESSIONS = 16
SETTLED = 20
SPARE_MIB = 8


def time_server() -> list[str]:
    """How the real server is started."""
    spec = importlib.util.spec_from_file_location("setup_servers", ROOT / "tools" / "setup_servers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["setup_servers"] = module
    spec.loader.exec_module(module)
    return module.argv("time")


def bare_client(argv: list[str]) -> Any:
    from mcp import Client, StdioServerParameters, stdio_client

    return Client(stdio_client(StdioServerParameters(command=argv[0], args=argv[1:]), errlog=open(os.devnull, "w")))


async def time_calls(argv: list[str], count: int) -> dict[str, float]:
    """Median milliseconds of a call, ours and bare."""
    text = json.dumps(ARGUMENTS)
    async with SessionPool([McpServer(name="time", command=tuple(argv))]) as pool, pool.environment() as env, bare_client(argv) as client:
        await client.list_tools()
        ours: list[float] = []
        bare: list[float] = []
        for index in range(count + 20):
            start = time.perf_counter()
            await client.call_tool("convert_time", ARGUMENTS)
            middle = time.perf_counter()
            reply = await env.call("convert_time", text)
            end = time.perf_counter()
            assert reply.ok, reply
            if index >= 20:
                bare.append(middle - start)
                ours.append(end - middle)
    found = {"bare": statistics.median(bare) * 1e3, "ours": statistics.median(ours) * 1e3}
    return {**found, "added": found["ours"] - found["bare"]}


async def start_bare(argv: list[str], count: int) -> float:
    async def one(opened: asyncio.Event, everyone: asyncio.Barrier) -> None:
        async with bare_client(argv) as client:  # entered and left in one task, as it must be
            await client.list_tools()
            await everyone.wait()
            opened.set()

    opened, everyone = asyncio.Event(), asyncio.Barrier(count)
    start = time.perf_counter()
    tasks = [asyncio.create_task(one(opened, everyone)) for _ in range(count)]
    await opened.wait()
    took = time.perf_counter() - start
    await asyncio.gather(*tasks)
    return took


async def start_ours(argv: list[str], count: int) -> float:
    async with SessionPool([McpServer(name="time", command=tuple(argv))]) as pool, AsyncExitStack() as stack:
        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(stack.enter_async_context(pool.environment()))
        return time.perf_counter() - start


def running(pid: int) -> bool:
    """Whether it is there and no zombie (which is its new parent's to clear away)."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def leak(rollouts: int, folder: str) -> dict[str, float]:
    """What is left of rollouts whose server leaves a child behind; `folder` is empty and for nothing else."""
    script = ROOT / "tests" / "support" / "hostile_servers" / "spawns_children.py"
    me = psutil.Process()
    notes = Path(folder) / "notes"
    tempfile.tempdir = folder  # where sessions put their folders
    server = McpServer(name="spawn", command=(sys.executable, str(script), "detached"), env={"NOTES": str(notes)})
    memory = descriptors = 0
    async with SessionPool([server], warm=2) as pool:
        for index in range(rollouts):
            async with pool.environment() as env:
                reply = await env.call("spawn", {})
                assert reply.ok, reply
            if index == SETTLED - 1:
                gc.collect()
                memory, descriptors = me.memory_info().rss, me.num_fds()
        gc.collect()
        grown, more = (me.memory_info().rss - memory) / 2**20, max(me.num_fds() - descriptors, 0)
    tempfile.tempdir = None
    children = [int(line) for line in notes.read_text().split()] + [child.pid for child in me.children(recursive=True)]
    processes, files = sum(map(running, children)), len(os.listdir(folder)) - 1
    leaked = processes + files + more + round(max(grown - SPARE_MIB, 0))
    return {"processes": processes, "files": files, "descriptors": more, "grown_mib": grown, "leaked": leaked}


async def main(quick: bool) -> None:
    argv = time_server()
    calls = await time_calls(argv, 100 if quick else 1000)
    print(f"a call: bare SDK {calls['bare']:.3f} ms, ours {calls['ours']:.3f} ms, added {calls['added']:.3f} ms", flush=True)
    count, rounds = (4, 1) if quick else (SESSIONS, 3)
    pairs: list[tuple[float, float]] = []
    for _ in range(rounds):
        pairs.append((await start_bare(argv, count), await start_ours(argv, count)))
        print(f"{count} sessions: bare SDK {pairs[-1][0]:.2f} s, ours {pairs[-1][1]:.2f} s", flush=True)
    ratio = statistics.median(ours / bare for bare, ours in pairs)
    rollouts = 40 if quick else 200
    with tempfile.TemporaryDirectory() as folder:
        left = await leak(rollouts, folder)
    print(
        f"{rollouts} rollouts left {left['processes']} processes, {left['files']} files, {left['descriptors']} descriptors, "
        f"and {left['grown_mib']:.1f} MiB of memory",
        flush=True,
    )
    print(json.dumps({"p50_added_ms": round(calls["added"], 3), "start_ratio": round(ratio, 3), "leaked": left["leaked"]}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a short run: numbers are rough")
    asyncio.run(main(parser.parse_args().quick))
