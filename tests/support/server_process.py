"""The real server as a process of its own, which can kill itself with SIGKILL as a phase of a train job begins.

with ServerProcess(home) as server:
    server.post("/api/models", {...})

python -m support.server_process HOME READY_FILE [PHASE]
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from apprentice.core.client.lifeline import announce_ready, end_with_parent, read_ready

TESTS = Path(__file__).resolve().parent.parent
START_SECONDS = 120.0
KEY = "a-key-for-tests-only"


class ServerProcess:
    """Starts on a free port and waits until it is ready. `kill_at`: the phase at whose beginning it kills itself."""

    def __init__(self, home: Path, kill_at: str | None = None) -> None:
        self.home, self.kill_at = home, kill_at

    def __enter__(self) -> Self:
        self.home.mkdir(parents=True, exist_ok=True)
        ready_file = self.home / f"ready-{time.monotonic_ns()}.json"
        command = [sys.executable, "-m", "support.server_process", str(self.home), str(ready_file), self.kill_at or "never"]
        environment = {**os.environ, "PYTHONPATH": f"{TESTS}:{TESTS.parent}", "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "passive"}
        log = (self.home / "server.log").open("ab")
        self.process = subprocess.Popen(command, stdout=log, stderr=log, env={**environment, "TEST_PARENT": str(os.getpid())})
        log.close()
        self.client = httpx.Client(base_url=self._wait(ready_file), headers={"authorization": f"Bearer {KEY}"}, timeout=120)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.client.close()
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _wait(self, ready_file: Path) -> str:
        end = time.monotonic() + START_SECONDS
        while (ready := read_ready(ready_file)) is None:
            if self.process.poll() is not None or time.monotonic() > end:
                raise AssertionError(f"the server did not start:\n{(self.home / 'server.log').read_text()[-3000:]}")
            time.sleep(0.05)
        return ready.url

    def post(self, path: str, body: dict[str, Any], **headers: str) -> Any:
        answer = self.client.post(path, json=body, headers=headers)
        assert answer.status_code < 300, answer.text
        return answer.json() if answer.content else None

    def get(self, path: str) -> Any:
        answer = self.client.get(path)
        assert answer.status_code < 300, answer.text
        return answer.json() if answer.content else None

    def end_of(self, job_id: str) -> dict[str, Any]:
        """The job, once it has ended; waits on its events."""
        with self.client.stream("GET", f"/api/train-jobs/{job_id}/events") as events:
            for line in events.iter_lines():
                if '"kind":"end"' in line.replace(" ", ""):
                    break
        return self.get(f"/api/train-jobs/{job_id}")

    def wait_until_killed(self) -> None:
        assert self.process.wait(120) == -signal.SIGKILL


def main() -> None:
    home, ready_file, kill_at = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    end_with_parent(int(os.environ["TEST_PARENT"]))
    import torch

    from apprentice.core.server.serve import ServerOptions, run_server

    torch.set_num_threads(1)

    def on_phase(_: str, phase: str) -> None:
        if phase == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    options = ServerOptions(home=home, port=0, api_key=KEY)
    asyncio.run(run_server(options, lambda port: announce_ready(ready_file, f"http://127.0.0.1:{port}"), on_phase))


if __name__ == "__main__":
    main()
