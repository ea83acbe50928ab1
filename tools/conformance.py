"""The official MCP conformance suite against our own sessions: a table, and exit code 1 if a scenario does not pass.

Usage: .venv/bin/python tools/conformance.py [SCENARIO ...]     without a name, all that concern a client without OAuth

The suite starts a server for each scenario and runs, as the client under test, this file with `--client URL`. It is an npm package
that needs a newer Node than many machines have, so one comes with it; both are installed beside the servers of setup_servers.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import setup_servers

from apprentice.integrations.mcp.session import McpSession
from apprentice.integrations.mcp.spec import parse_server

SUITE = setup_servers.Recipe(
    "npm", ("@modelcontextprotocol/conformance@0.1.16", "node@22.23.3"), "node_modules/@modelcontextprotocol/conformance/dist/index.js"
)
NODE = "node_modules/node/bin/node"
SCENARIOS = ("initialize", "tools_call", "elicitation-sep1034-client-defaults", "sse-retry")
SECONDS = 20.0
"""For connecting, and for a call; the suite itself ends a client after 30."""
SAMPLES: dict[str, Any] = {"integer": 2, "number": 2.5, "string": "text", "boolean": True, "array": [], "object": {}}


@dataclass(frozen=True, slots=True)
class Verdict:
    scenario: str
    passed: int
    checks: int
    ok: bool
    seconds: float
    output: str


async def client(url: str) -> int:
    """What every scenario asks of a client: connect, list the tools, call each. 1 if a call fails."""
    failed = 0
    async with McpSession(parse_server(url, connect_seconds=SECONDS, call_seconds=SECONDS)) as session:
        print(f"connected, protocol {session.protocol}, tools: {', '.join(tool.name for tool in session.tools) or 'none'}")
        for tool in session.tools:
            reply = await session.call(tool.name, arguments_for(tool.input_schema))
            print(f"{tool.name}: {reply.outcome}: {reply.text[:500]} {list(reply.notes)}")
            failed += not reply.ok
    return min(failed, 1)


def arguments_for(schema: dict[str, Any]) -> dict[str, Any]:
    """A value for each required property."""
    properties = schema.get("properties") or {}
    fields = {name: properties.get(name, {}) for name in schema.get("required") or []}
    return {name: field.get("default", SAMPLES.get(field.get("type"), "text")) for name, field in fields.items()}


def run(folder: Path, scenario: str) -> Verdict:
    command = shlex.join([sys.executable, str(Path(__file__).resolve()), "--client"])
    with tempfile.TemporaryDirectory() as results:
        argv = [str(folder / NODE), str(folder / SUITE.entry), "client", "--command", command, "--scenario", scenario, "-o", results]
        start = time.perf_counter()
        done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True, check=False)
        seconds = time.perf_counter() - start
        statuses = [check["status"] for file in Path(results).rglob("checks.json") for check in json.loads(file.read_text())]
    passed, checks = statuses.count("SUCCESS"), sum(status in ("SUCCESS", "FAILURE", "WARNING") for status in statuses)
    return Verdict(scenario, passed, checks, done.returncode == 0 and 0 < passed == checks, seconds, done.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", default=SCENARIOS)
    parser.add_argument("--client", metavar="URL", help="be the client under test")
    args = parser.parse_args()
    if args.client:
        return asyncio.run(client(args.client))
    try:
        folder = setup_servers.install("conformance", SUITE)
    except setup_servers.NotInstallable as error:
        print(f"conformance: {error}", file=sys.stderr)
        return 2
    verdicts = []
    for scenario in args.scenarios:
        verdicts.append(run(folder, scenario))
        if not verdicts[-1].ok:
            print(f"== {scenario}\n{verdicts[-1].output}", flush=True)
    print(f"{'scenario':<40}{'checks':>8}{'seconds':>9}  verdict")
    for verdict in verdicts:
        checks = f"{verdict.passed}/{verdict.checks}"
        print(f"{verdict.scenario:<40}{checks:>8}{verdict.seconds:>9.1f}  {'passed' if verdict.ok else 'FAILED'}")
    return int(not all(verdict.ok for verdict in verdicts))


if __name__ == "__main__":
    raise SystemExit(main())
