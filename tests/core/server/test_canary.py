"""The canary: an engine that reports success and serves something else fails the job, which then has changed nothing."""

from __future__ import annotations

import hashlib
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.real_parts import POLICY, LyingEngine, RealServer, job, lying, real_server, recorded_home, registration
from support.tiny_models import tiny_llama

from apprentice.core.engines.memory import ScriptedEngine
from apprentice.core.engines.protocol import PolicyVersion
from apprentice.core.errors import StaleEngine
from apprentice.core.server.canary import check_canary

VERSION = PolicyVersion(POLICY, 1)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[dict[str, Any]]]]:
    """A home with finished rollouts and no train job yet. Copy it; do not use it."""
    home = tmp_path_factory.mktemp("home")
    return home, recorded_home(tiny_llama(tmp_path_factory.mktemp("base")), home)


@pytest.fixture
def home(recorded: tuple[Path, Any], tmp_path: Path) -> Path:
    return Path(shutil.copytree(recorded[0], tmp_path / "home"))


def files(server: RealServer) -> dict[str, str]:
    """Every published file and its hash."""
    root = server.home / "checkpoints" / POLICY
    return {p.relative_to(root).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in root.rglob("*") if p.is_file()}


def same_answer(a: tuple[int, list[float]], b: tuple[int, list[float]]) -> bool:
    """Same version and weights; what the cache holds decides the last bits."""
    return a[0] == b[0] and a[1] == pytest.approx(b[1], abs=5e-6)


@pytest.mark.parametrize("learning_rate", [1e-2, 1e-6])
async def test_an_engine_that_keeps_the_old_adapter_is_caught_and_nothing_has_changed(
    recorded: tuple[Path, Any], home: Path, tmp_path: Path, learning_rate: float
) -> None:
    body = job(recorded[1], learning_rate=learning_rate)
    async with real_server(Path(shutil.copytree(home, tmp_path / "honest"))) as honest:
        assert (await honest.train(body))["status"] == "trained"
        honest_weights = honest.weights()
    async with real_server(home, LyingEngine) as server:
        answer, published = await server.greedy(), files(server)
        weights = server.weights()
        with lying(home / "checkpoints" / POLICY / "000000" / "adapter"):
            result = await server.train(body)
        assert (result["status"], result["previous_step"], result["step"]) == ("failed", 0, 0)
        assert f"{POLICY}@1" in result["reason"]
        sentence = "does not serve" if learning_rate == 1e-2 else "still serves the weights before"
        assert sentence in result["reason"], result["reason"]
        assert (await server.get(f"/api/models/{POLICY}"))["step"] == 0
        assert [c["step"] for c in await server.get(f"/api/checkpoints?policy={POLICY}")] == [0]
        assert files(server) == published
        assert server.weights() == weights
        assert same_answer(await server.greedy(), answer)
        assert (await server.client.post("/v1/chat/completions", json={"model": f"{POLICY}@1", "messages": []})).status_code in (400, 404)
        again = await server.train(body)
        assert (again["status"], again["step"]) == ("trained", 1), again["reason"]
        assert server.weights() == honest_weights
        assert (await server.greedy())[0] == 1
        assert same_answer(await server.greedy(f"{POLICY}@0"), answer)
        assert not same_answer((0, (await server.greedy())[1]), answer) or learning_rate < 1e-3


async def test_an_engine_that_loads_another_adapter_is_caught(recorded: tuple[Path, Any], home: Path, tmp_path: Path) -> None:
    async with real_server(Path(shutil.copytree(home, tmp_path / "other"))) as other:
        await other.train(job(recorded[1], learning_rate=0.1))
    async with real_server(home, LyingEngine) as server:
        answer = await server.greedy()
        with lying(tmp_path / "other" / "checkpoints" / POLICY / "000001" / "adapter"):
            result = await server.train(job(recorded[1]))
        assert result["status"] == "failed"
        assert f"the engine does not serve {POLICY}@1" in result["reason"]
        assert same_answer(await server.greedy(), answer)
        assert (await server.train(job(recorded[1])))["step"] == 1


async def test_a_wrong_adapter_at_registration_is_caught_and_leaves_nothing_behind(
    recorded: tuple[Path, Any], home: Path, tmp_path: Path
) -> None:
    async with real_server(home, LyingEngine) as server:
        await server.train(job(recorded[1]))
        trained = home / "checkpoints" / POLICY / "000001" / "adapter"
        runtime, other = server.runtime(), registration(Path(server.runtime().body.base_model), "other")
        adapters, loaded = runtime.base.host.adapters(), runtime.base.engine.loaded()
        with lying(trained):
            refused = await server.client.post("/api/models", json=other)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stale_engine")
        assert [m["policy"] for m in await server.get("/api/models")] == [POLICY]
        accepted = await server.post("/api/models", other)
        assert accepted["step"] == 0
        assert runtime.base.host.adapters() == adapters | {"test/other", "serving:test/other@0"}
        assert runtime.base.engine.loaded() == loaded | {PolicyVersion("test/other", 0)}


class ScoringEngine(ScriptedEngine):
    """Scores every row as `values`."""

    def __init__(self, values: list[float], dtype: str) -> None:
        super().__init__(lambda *_: [])
        self.values, self.dtype = values, dtype

    def info(self) -> Any:
        return type("Info", (), {"dtype": self.dtype})

    async def score(self, token_ids: Any, policy: PolicyVersion) -> list[float]:
        return self.values


async def verdict(served: list[float], new: list[float], old: list[float], dtype: str) -> bool:
    """Whether the engine is taken for honest."""
    try:
        await check_canary(ScoringEngine(served, dtype), VERSION, [[0] * (len(new) + 1)], [new], [old])
    except StaleEngine:
        return False
    return True


@pytest.mark.parametrize(("dtype", "noise"), [("float32", 1e-5), ("bfloat16", 2e-2)])
async def test_rounding_noise_never_accuses_an_honest_engine_whatever_the_size_of_the_update(dtype: str, noise: float) -> None:
    rng = random.Random(3)
    for update in (0.0, noise / 1000, noise / 30, noise, 30 * noise):
        for _ in range(100):
            old = [rng.uniform(-8, -1) for _ in range(256)]
            new = [value + rng.gauss(0, update) for value in old]
            assert await verdict([value + rng.gauss(0, noise) for value in new], new, old, dtype), update


@pytest.mark.parametrize(("dtype", "noise"), [("float32", 1e-5), ("bfloat16", 2e-2)])
async def test_a_stale_engine_is_caught_even_if_the_update_is_no_larger_than_the_noise(dtype: str, noise: float) -> None:
    rng = random.Random(4)
    for _ in range(100):
        old = [rng.uniform(-8, -1) for _ in range(256)]
        new = [value + rng.gauss(0, noise) for value in old]
        assert not await verdict([value + rng.gauss(0, noise) for value in old], new, old, dtype)


async def test_a_score_that_is_not_a_number_fails_the_canary_wherever_it_stands() -> None:
    for place in range(3):
        served = [-1.0, -1.0, -1.0]
        served[place] = float("nan")
        assert not await verdict(served, [-1.0] * 3, [-1.0] * 3, "float32")
