"""What goes wrong around a train job: each job ends with a reason, the queue goes on, and what was served stays served."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from support.chat_tokenizers import tokenizer_of
from support.real_parts import POLICY, LyingEngine, RealServer, job, lying, real_server, recorded_home, registration
from support.tiny_models import tiny_llama

from apprentice.core.engines.embedded import EmbeddedEngine
from apprentice.core.engines.protocol import BASE, PolicyVersion, TokenChunk
from apprentice.core.errors import InvalidRequest, LedgerFull
from apprentice.core.server.chat import ChatCodec
from apprentice.core.server.job_inputs import check_request, load_targets
from apprentice.core.server.ledger import Ledger
from apprentice.core.server.limits import Limits
from apprentice.core.wire import Demonstration, SftJob, TrainJob


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[dict[str, Any]]]]:
    home = tmp_path_factory.mktemp("home")
    return home, recorded_home(tiny_llama(tmp_path_factory.mktemp("base")), home)


@pytest.fixture
def base(recorded: tuple[Path, Any]) -> Path:
    with Ledger.open(recorded[0] / "ledger.sqlite", read_only=True) as ledger:
        return Path(ledger.policy(POLICY).base_model)


@pytest.fixture
def home(recorded: tuple[Path, Any], tmp_path: Path) -> Path:
    return Path(shutil.copytree(recorded[0], tmp_path / "home"))


def adapter(server: RealServer, step: int) -> Path:
    return server.home / "checkpoints" / POLICY / f"{step:06d}" / "adapter"


async def kinds(server: RealServer, job_id: str, after: int = 0) -> list[str]:
    return [event.kind async for event in server.jobs.events(job_id, after)]


async def test_a_failure_while_computing_leaves_the_engine_running_and_the_policy_as_it_was(recorded: tuple[Path, Any], home: Path) -> None:
    async with real_server(home) as server:
        await server.greedy()
        weights = server.weights()
        result = await server.train(job(recorded[1], learning_rate=1e25, num_iterations=3))
        assert (result["status"], result["step"]) == ("failed", 0)
        assert "not finite" in result["reason"]
        assert server.weights() == weights
        assert (await server.greedy())[0] == 0
        assert (await server.train(job(recorded[1])))["step"] == 1


@pytest.mark.parametrize(("reward", "option"), [(1.7e308, {}), (2.0, {"activation_memory_gib": 1e308})])
async def test_a_number_too_large_to_compute_with_fails_its_job_in_words(
    recorded: tuple[Path, Any], home: Path, reward: float, option: dict[str, Any]
) -> None:
    async with real_server(home) as server:
        members = recorded[1][0]
        group = [{"id": member["id"], "reward": reward * (number / 2)} for number, member in enumerate(members)]
        result = await server.train(job([group], **option))
        assert (result["status"], result["step"]) == ("failed", 0)
        assert "too large to compute with" in result["reason"]


async def test_a_job_whose_undoing_fails_too_tells_both_and_the_next_one_puts_the_policy_back(
    recorded: tuple[Path, Any], home: Path, tmp_path: Path
) -> None:
    async with real_server(Path(shutil.copytree(home, tmp_path / "honest"))) as honest:
        await honest.train(job(recorded[1]))
        expected = honest.weights()
    async with real_server(home, LyingEngine) as server:
        await server.greedy()
        state = adapter(server, 0).parent / "trainer" / "optimizer.safetensors"
        whole = state.read_bytes()
        with lying(adapter(server, 0)):
            state.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
            result = await server.train(job(recorded[1]))
        assert result["status"] == "failed"
        assert "does not serve" in result["reason"]
        assert "could not be put back either: checkpoint test/agent@0" in result["reason"]
        assert (await server.greedy())[0] == 0
        assert (await server.get("/api/models"))[0]["step"] == 0
        still = await server.train(job(recorded[1]))
        assert (still["status"], still["step"]) == ("failed", 0)
        assert "optimizer.safetensors" in still["reason"]
        state.write_bytes(whole)
        assert (await server.train(job(recorded[1])))["step"] == 1
        assert server.weights() == expected


async def test_a_request_that_cannot_be_read_fails_its_job_and_not_the_queue(recorded: tuple[Path, Any], home: Path) -> None:
    async with real_server(home) as server:
        now = time.time()
        bad = TrainJob(id="job-bad", policy=POLICY, kind="grpo", state="queued", phase="queued", created_at=now, updated_at=now)
        server.ledger.create_job(bad, b'{"kind": "from the future"}', None)
        good = await server.train(job(recorded[1]))
        assert good["status"] == "trained"
        result = await server.end_of("job-bad")
        assert result["status"] == "failed"
        assert "kind" in result["reason"]


ASK, ANSWER = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}
BAD_DEMONSTRATIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, ".messages", "must hold at least one message"),
    ({"messages": [ASK, {"role": "robot", "content": "4"}]}, ".messages[1].role", "must be one of system, developer, user"),
    ({"messages": [ASK, {"content": "4"}]}, ".messages[1].role", "must be one of system, developer, user"),
    ({"messages": [ASK, {**ANSWER, "content": 4}]}, ".messages[1].content", "must be a string, null or a list of text parts, got int"),
    ({"messages": [ASK, {**ANSWER, "content": [{"type": "image_url"}]}]}, ".messages[1].content[0]", "has type 'image_url', only text"),
    ({"messages": [ASK, {**ANSWER, "tool_calls": {}}]}, ".messages[1].tool_calls", "must be a list, got dict"),
    ({"messages": [ASK, {**ANSWER, "tool_calls": [{"name": "f"}]}]}, ".messages[1].tool_calls[0]", "must be a function call"),
    ({"messages": [ASK, ANSWER], "tools": [{"name": "f"}]}, ".tools[0]", 'must be {"type": "function"'),
    ({"messages": [ASK, {**ANSWER, "train": "false"}]}, ".messages[1].train", "must be true or false, got str"),
    ({"messages": [ANSWER]}, ".messages[0]", "is an assistant message; a demonstration begins with"),
    ({"messages": [ASK]}, "", "has no assistant message to learn"),
    ({"messages": [ASK, {**ANSWER, "train": False}]}, "", "has no assistant message to learn"),
]


async def test_a_demonstration_that_cannot_be_learned_from_is_refused_before_its_job_is_accepted(home: Path) -> None:
    async with real_server(home) as server:
        for bad, place, sentence in BAD_DEMONSTRATIONS:
            body = {"kind": "sft", "policy": POLICY, "demonstrations": [{"messages": [ASK, ANSWER]}, bad]}
            answer = await server.client.post("/api/train-jobs", json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_request", f"demonstrations[1]{place}"), error
            assert error["message"].startswith(f"demonstrations[1]{place} {sentence}"), error
        assert await server.get("/api/train-jobs") == []
        shown = [ASK, {**ANSWER, "train": None}, ASK, {**ANSWER, "train": False}]
        result = await server.train({"kind": "sft", "policy": POLICY, "demonstrations": [{"messages": shown}]})
        assert (result["status"], result["step"]) == ("trained", 1)


def test_a_demonstration_that_this_models_template_cannot_write_is_named(home: Path) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    tool: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    both = Demonstration(messages=(ASK, {**ANSWER, "content": "", "tool_calls": [call, call]}), tools=(tool,))
    request = SftJob(policy=POLICY, demonstrations=(Demonstration(messages=(ASK, ANSWER)), both))
    with Ledger.open(home / "ledger.sqlite") as ledger:
        check_request(ledger, request)
        with pytest.raises(InvalidRequest, match=r"demonstrations\[1\]: this model's chat template takes one tool call per message"):
            load_targets(ledger, ChatCodec(tokenizer_of("llama3_2")), request)


async def test_the_end_of_a_job_is_recorded_once_the_ledger_takes_it_again(
    recorded: tuple[Path, Any], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("apprentice.core.server.jobs.LEDGER_SECONDS", 0.01)
    async with real_server(home) as server:
        whole, refusals = server.ledger.update_job, 3

        def full_disk(job_id: str, **changes: Any) -> TrainJob:
            nonlocal refusals
            if "result" in changes and refusals:
                refusals -= 1
                raise LedgerFull("the disk is full")
            return whole(job_id, **changes)

        monkeypatch.setattr(server.ledger, "update_job", full_disk)
        assert (await server.train(job(recorded[1])))["step"] == 1
        assert refusals == 0
        assert (await server.train(job(recorded[1])))["step"] == 2


async def test_closing_amid_training_waits_for_the_thread_and_the_job_goes_on_at_the_next_start(
    recorded: tuple[Path, Any], home: Path, tmp_path: Path
) -> None:
    body = job(recorded[1], num_iterations=50)
    async with real_server(Path(shutil.copytree(home, tmp_path / "unbroken"))) as unbroken:
        await unbroken.train(body)
        expected = unbroken.weights()
    async with real_server(home) as server:
        submitted = await server.post("/api/train-jobs", body)
        async for event in server.jobs.events(submitted["id"], 0):
            if event.kind == "phase" and event.data["phase"] == "forward_backward":
                break
        await server.jobs.close()
        assert server.ledger.job(submitted["id"]).state == "running"
        assert server.runtime().base.host.lock.acquire(blocking=False), "the training thread still holds the weights"
        server.runtime().base.host.lock.release()
    async with real_server(home) as server:
        result = await server.end_of(submitted["id"])
        assert (result["status"], result["step"]) == ("trained", 1), result["reason"]
        assert server.weights() == expected


async def test_events_are_in_order_and_end_once_however_often_they_are_followed(recorded: tuple[Path, Any], home: Path) -> None:
    async with real_server(home) as server:
        submitted = await server.post("/api/train-jobs", job(recorded[1], num_iterations=5))
        await asyncio.gather(*(kinds(server, submitted["id"]) for _ in range(3)))
        events = server.ledger.events(submitted["id"], 0)
        assert [e.kind for e in events].count("end") == 1
        assert events[-1].kind == "end"
        done = [e.data["done"] for e in events if e.kind == "progress" and e.data["phase"] == "forward_backward"]
        assert done == list(range(1, 6))
        assert await kinds(server, submitted["id"], events[-1].seq) == []
        assert len(server.ledger.events(submitted["id"], 0)) == len(events)


async def test_of_two_jobs_that_want_to_be_alone_one_is_refused(recorded: tuple[Path, Any], home: Path) -> None:
    async with real_server(home) as server:
        body = {**job(recorded[1]), "on_busy": "refuse"}
        answers = await asyncio.gather(*(server.client.post("/api/train-jobs", json=body) for _ in range(4)))
        assert sorted(answer.status_code for answer in answers) == [202, 409, 409, 409]


async def test_a_call_that_was_waiting_with_the_version_before_is_answered_by_it(recorded: tuple[Path, Any], home: Path) -> None:
    async with real_server(home) as server:
        await server.greedy()
        engine, version = server.runtime().base.engine, server.runtime().version
        for step in range(1, 3):
            assert (await server.train(job(recorded[1])))["step"] == step
        assert version in engine.loaded()
        scored = await engine.score([1, 2, 3, 4], version)
        assert scored == pytest.approx(await engine.score([1, 2, 3, 4], BASE), abs=1e-5), "version 0 changes nothing yet"
        for _ in range(3, 8):
            await server.train(job(recorded[1]))
        assert engine.loaded() == {BASE, *(PolicyVersion(POLICY, step) for step in range(3, 8))}


class BusyEngine(EmbeddedEngine):
    """Calls of the bare base model wait until `free` is set, so that those behind them wait for their turn."""

    free: asyncio.Event

    async def generate(self, *arguments: Any) -> AsyncIterator[TokenChunk]:
        if arguments[2] == BASE:
            await self.free.wait()
        async for chunk in super().generate(*arguments):
            yield chunk


async def test_a_call_that_waits_through_many_jobs_is_answered_by_its_version_loaded_again(
    recorded: tuple[Path, Any], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BusyEngine, "free", asyncio.Event(), raising=False)
    async with real_server(home, BusyEngine, Limits(running_per_engine=1)) as server:
        answer = await server.greedy()
        name = server.runtime().base.name
        before = asyncio.create_task(server.post("/v1/completions", {"model": name, "prompt": [1], "max_tokens": 1}))
        waiting = asyncio.create_task(server.greedy())
        while (await server.get("/health"))["queued"] == 0:  # noqa: ASYNC110  # the queue tells nobody
            await asyncio.sleep(0.01)
        for step in range(1, 7):
            assert (await server.train(job(recorded[1])))["step"] == step
        assert PolicyVersion(POLICY, 0) not in server.runtime().base.engine.loaded()
        BusyEngine.free.set()
        await before
        step, logprobs = await waiting
        assert (step, logprobs) == (0, pytest.approx(answer[1], abs=1e-5))
        await server.train(job(recorded[1]))
        assert [checkpoint.step for checkpoint in server.policies.store.list(POLICY)] == [5, 6, 7], "nobody waits for step 0 now"


async def test_a_published_version_cannot_be_called_before_the_canary_has_seen_it(
    recorded: tuple[Path, Any], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with real_server(home) as server:
        await server.greedy()
        asked: list[int] = []
        whole = server.policies.advance

        async def before_it_counts(*arguments: Any) -> None:
            body = {"model": f"{POLICY}@1", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
            asked.append((await server.client.post("/v1/chat/completions", json=body)).status_code)
            await whole(*arguments)
            asked.append((await server.client.post("/v1/chat/completions", json=body)).status_code)

        monkeypatch.setattr(server.policies, "advance", before_it_counts)
        await server.train(job(recorded[1]))
        assert asked == [404, 200]


async def test_registration_never_deletes_checkpoints_that_the_ledger_does_not_know(recorded: tuple[Path, Any], home: Path) -> None:
    async with real_server(home) as server:
        await server.train(job(recorded[1]))
        body = registration(Path(server.runtime().body.base_model))
    for file in ("ledger.sqlite", "ledger.sqlite-wal", "ledger.sqlite-shm"):
        (home / file).unlink(missing_ok=True)
    async with real_server(home) as server:
        refused = await server.client.post("/api/models", json=body)
        assert refused.status_code == 409
        assert "move them away" in refused.json()["error"]["message"]
        assert {path.name for path in (home / "checkpoints" / POLICY).iterdir()} == {"000000", "000001"}


async def test_a_policy_that_cannot_be_restored_leaves_nothing_in_memory_and_can_be_once_it_is_repaired(
    recorded: tuple[Path, Any], home: Path
) -> None:
    async with real_server(home, LyingEngine) as server:
        with lying(home / "nowhere"):
            refused = await server.client.post(
                "/v1/chat/completions", json={"model": POLICY, "messages": [{"role": "user", "content": "a"}]}
            )
        assert refused.status_code == 503
        (base,) = server.bases.loaded().values()
        assert base.host.adapters() == frozenset()
        assert (await server.greedy())[0] == 0


async def test_the_ledger_is_brought_in_line_with_the_folders_when_a_policy_is_restored(recorded: tuple[Path, Any], home: Path) -> None:
    async with real_server(home) as server:
        await server.train(job(recorded[1]))
        server.ledger.mark_checkpoint(POLICY, 1, deleted=True)  # as a kill between the two leaves it
    async with real_server(home) as server:
        await server.greedy()
        assert [info.step for info in server.ledger.checkpoints(POLICY)] == [0, 1]
        pinned = await server.post(f"/api/checkpoints/{POLICY}/1/pin", {"pinned": True})
        assert pinned["pinned"]


async def test_a_damaged_older_checkpoint_does_not_keep_a_policy_from_being_served(recorded: tuple[Path, Any], home: Path) -> None:
    async with real_server(home) as server:
        await server.train(job(recorded[1]))
    (adapter(server, 0).parent / "state.json").write_text("{")
    async with real_server(home) as server:
        assert (await server.greedy())[0] == 1
        refused = await server.client.get("/api/checkpoints")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "checkpoint_corrupt")


def broken_base(whole: Path, folder: Path, what: str) -> str:
    """A folder like `whole` with one thing wrong in it, or a name that is none."""
    shutil.copytree(whole, folder)
    config = json.loads((whole / "config.json").read_text())
    match what:
        case "index":
            (folder / "model.safetensors.index.json").write_text('{"weight_map": []}')
        case "architectures":
            (folder / "config.json").write_text(json.dumps({**config, "architectures": 5}))
        case "quantization":
            (folder / "config.json").write_text(json.dumps({**config, "quantization_config": "x"}))
        case "weights":
            (path,) = folder.glob("*.safetensors")
            save_file({name: tensor * math.nan for name, tensor in load_file(path).items()}, path, metadata={"format": "pt"})
        case _:
            return what
    return str(folder)


@pytest.mark.parametrize(
    "what", ["index", "architectures", "quantization", "weights", "x" * 1000, "~nobody-of-this-name/x", "a\nb", "\x00"]
)
async def test_a_base_model_that_cannot_be_used_is_refused_in_one_sentence(base: Path, tmp_path: Path, what: str) -> None:
    async with real_server(tmp_path / "home") as server:
        name = broken_base(base, tmp_path / "broken", what)
        refused = await server.client.post("/api/models", json=registration(base, base_model=name))
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["param"]) == (400, "model_refused", "base_model"), error
        assert "\n" not in error["message"]
        assert (await server.get("/api/models"), await server.get("/api/checkpoints")) == ([], [])


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"seed": 2**63}, "invalid_request"),
        ({"seed": -(10**400)}, "invalid_request"),
        ({"adapter": {"rank": 4, "alpha": 1e308}}, "model_refused"),
        ({"fork_from": "test/agent@" + "9" * 5000}, "config_error"),
        ({"fork_from": "test/agent@\u0663"}, "config_error"),
    ],
)
async def test_a_registration_that_cannot_be_carried_out_is_refused_and_leaves_nothing(
    base: Path, home: Path, change: dict[str, Any], code: str
) -> None:
    async with real_server(home) as server:
        refused = await server.client.post("/api/models", json=registration(base, name="other", **change))
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, code)
        assert [info["policy"] for info in await server.get("/api/models")] == [POLICY]
