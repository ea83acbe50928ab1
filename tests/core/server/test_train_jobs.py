"""Train jobs on the real server: sampled, rewarded, trained, published, synced and checked, also across SIGKILL."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.server_process import ServerProcess
from support.tiny_models import tiny_llama

POLICY = "test/agent"
PHASES = ("loading", "forward_backward", "checkpoint", "sync", "canary", "done")
GROUPS, SIZE = 2, 3


def registration(base: Path) -> dict[str, Any]:
    return {"project": "test", "name": "agent", "base_model": str(base), "adapter": {"rank": 4}, "seed": 7}


def record_rollouts(server: ServerProcess) -> list[list[dict[str, Any]]]:
    """Two groups of finished trajectories of two turns each; the groups of a train job with their rewards."""
    groups: list[list[dict[str, Any]]] = []
    for group in range(GROUPS):
        members: list[dict[str, Any]] = []
        for number in range(SIZE):
            name = f"g{group}-m{number}"
            server.post("/api/trajectories", {"id": name, "policy": POLICY, "group_id": f"g{group}"})
            messages: list[dict[str, Any]] = [{"role": "user", "content": f"question {group}"}]
            for turn in range(2):
                body = {"model": POLICY, "messages": messages, "max_tokens": 8, "seed": 100 * group + 10 * number + turn}
                reply = server.post(f"/t/{name}/v1/chat/completions", body)["choices"][0]["message"]
                messages += [{"role": "assistant", "content": reply["content"] or ""}, {"role": "user", "content": "and now?"}]
            server.post(f"/api/trajectories/{name}/finish", {})
            members.append({"id": name, "reward": float(number)})
        groups.append(members)
    return groups


def job(groups: list[list[dict[str, Any]]], **config: Any) -> dict[str, Any]:
    return {"kind": "grpo", "policy": POLICY, "groups": groups, "config": {"learning_rate": 1e-2, **config}}


def digest(home: Path, step: int) -> dict[str, str]:
    """The hash of every file of weights and optimizer state of a checkpoint."""
    folder = home / "checkpoints" / "test" / "agent" / f"{step:06d}"
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.parent.name in ("adapter", "trainer"))
    assert files, f"no checkpoint in {folder}"
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[dict[str, Any]]]]:
    """A home with finished rollouts and no train job yet. Copy it; do not use it."""
    base = tiny_llama(tmp_path_factory.mktemp("base"))
    home = tmp_path_factory.mktemp("home")
    with ServerProcess(home) as server:
        server.post("/api/models", registration(base))
        groups = record_rollouts(server)
    return home, groups


@pytest.fixture(scope="module")
def unbroken(recorded: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    home = tmp_path_factory.mktemp("unbroken") / "home"
    shutil.copytree(recorded[0], home)
    with ServerProcess(home) as server:
        submitted = server.post("/api/train-jobs", job(recorded[1]), **{"idempotency-key": "step-1"})
        ended = server.end_of(submitted["id"])
    return home, ended["result"]


def test_a_job_moves_the_step_and_says_what_became_of_every_trajectory(unbroken: tuple[Path, dict[str, Any]]) -> None:
    _, result = unbroken
    assert (result["status"], result["previous_step"], result["step"]) == ("trained", 0, 1), result
    assert set(result["fates"].values()) == {"trained"}
    assert len(result["fates"]) == GROUPS * SIZE
    assert result["metrics"]["reward/mean"] == 1.0
    assert result["metrics"]["sampling_logp_difference/max"] < 1e-4
    assert result["metrics"]["canary/max_difference"] < 1e-4 < result["metrics"]["canary/moved"]
    assert result["config"]["loss_type"] == "dapo"


@pytest.mark.parametrize("phase", PHASES)
def test_a_job_killed_as_a_phase_begins_ends_in_the_same_weights_bit_for_bit(
    phase: str, recorded: tuple[Path, Any], unbroken: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    home = tmp_path / "home"
    shutil.copytree(recorded[0], home)
    with ServerProcess(home, kill_at=phase) as server:
        server.client.post("/api/train-jobs", json=job(recorded[1]), headers={"idempotency-key": "step-1"})
        server.wait_until_killed()
    with ServerProcess(home) as server:
        again = server.post("/api/train-jobs", job(recorded[1]), **{"idempotency-key": "step-1"})
        result = server.end_of(again["id"])["result"]
        step = server.get(f"/api/models/{POLICY}")["step"]
    assert (result["status"], result["step"], step) == ("trained", 1, 1), result
    assert result["fates"] == unbroken[1]["fates"]
    assert digest(home, 1) == digest(unbroken[0], 1)


def test_a_killed_second_job_goes_on_with_the_optimizer_as_the_first_one_left_it(
    recorded: tuple[Path, Any], unbroken: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """Before the first job the optimizer is empty: only a later one, against a process that never ended, tells whether it comes back."""
    undisturbed, home = tmp_path / "undisturbed", tmp_path / "home"
    shutil.copytree(recorded[0], undisturbed)
    shutil.copytree(unbroken[0], home)
    with ServerProcess(undisturbed) as server:
        for _ in range(2):
            server.end_of(server.post("/api/train-jobs", job(recorded[1]))["id"])
    with ServerProcess(home, kill_at="forward_backward") as server:
        server.client.post("/api/train-jobs", json=job(recorded[1]), headers={"idempotency-key": "step-2"})
        server.wait_until_killed()
    with ServerProcess(home) as server:
        again = server.post("/api/train-jobs", job(recorded[1]), **{"idempotency-key": "step-2"})
        result = server.end_of(again["id"])["result"]
    assert (result["status"], result["previous_step"], result["step"]) == ("trained", 1, 2), result
    assert digest(home, 2) == digest(undisturbed, 2)


def test_equal_rewards_update_nothing_and_say_so(recorded: tuple[Path, Any], tmp_path: Path) -> None:
    home = tmp_path / "home"
    shutil.copytree(recorded[0], home)
    equal = [[{**member, "reward": 0.5} for member in group] for group in recorded[1]]
    lonely = [[recorded[1][0][0]]]
    before = digest(home, 0)
    with ServerProcess(home) as server:
        result = server.end_of(server.post("/api/train-jobs", job(equal))["id"])["result"]
        alone = server.end_of(server.post("/api/train-jobs", job(lonely))["id"])["result"]
        assert server.get(f"/api/models/{POLICY}")["step"] == 0
        assert [c["step"] for c in server.get(f"/api/checkpoints?policy={POLICY}")] == [0]
    assert (result["status"], result["step"], result["previous_step"]) == ("no_update", 0, 0)
    assert set(result["fates"].values()) == {"equal_rewards"}
    assert "6 equal_rewards" in result["reason"]
    assert set(alone["fates"].values()) == {"group_of_one"}
    assert digest(home, 0) == before


def test_bad_jobs_are_refused_with_a_sentence_before_they_are_accepted(recorded: tuple[Path, Any], tmp_path: Path) -> None:
    home, groups = tmp_path / "home", recorded[1]
    shutil.copytree(recorded[0], home)
    with ServerProcess(home) as server:
        server.post("/api/trajectories", {"id": "still-open", "policy": POLICY})
        server.post("/api/models", {**registration(Path(server.get(f"/api/models/{POLICY}")["base_model"])), "name": "other"})
        server.post("/api/trajectories", {"id": "foreign", "policy": "test/other"})
        server.post("/api/trajectories/foreign/finish", {})
        cases: list[tuple[dict[str, Any], int, str, str]] = [
            (job([[{"id": "nowhere", "reward": 1.0}]]), 404, "trajectory_not_found", "nowhere"),
            (job([[{"id": "still-open", "reward": 1.0}]]), 409, "trajectory_state", "open"),
            (job([[{"id": "foreign", "reward": 1.0}]]), 409, "foreign_trajectory", "test/other"),
            (job([[]]), 400, "invalid_request", "group 0 is empty"),
            (job([]), 400, "invalid_request", "groups"),
            (job([groups[0], groups[0]]), 400, "invalid_request", "twice"),
            (job(groups, loss_type="ppo"), 400, "invalid_request", "loss_type"),
            (job(groups, lr=1.0), 400, "invalid_request", "lr"),
            ({**job(groups), "policy": "test/unknown"}, 404, "model_not_found", "test/unknown"),
        ]
        for body, status, code, word in cases:
            answer = server.client.post("/api/train-jobs", json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (status, code), error
            assert word in error["message"] or word in str(error["param"]), error
        nan = server.client.post(
            "/api/train-jobs",
            content=b'{"kind":"grpo","policy":"test/agent","groups":[[{"id":"g0-m0","reward":NaN}]]}',
            headers={"content-type": "application/json"},
        )
        assert nan.status_code == 400
        assert "NaN" in nan.json()["error"]["message"]
        assert server.get("/api/train-jobs") == []


def test_a_second_job_queues_or_is_refused_by_choice_and_a_key_names_one_body(recorded: tuple[Path, Any], tmp_path: Path) -> None:
    home, groups = tmp_path / "home", recorded[1]
    shutil.copytree(recorded[0], home)
    with ServerProcess(home) as server:
        first = server.post("/api/train-jobs", job(groups, num_iterations=40), **{"idempotency-key": "one"})
        refused = server.client.post("/api/train-jobs", json={**job(groups), "on_busy": "refuse"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "job_conflict")
        queued = server.post("/api/train-jobs", job(groups), **{"idempotency-key": "two"})
        assert server.post("/api/train-jobs", job(groups), **{"idempotency-key": "two"})["id"] == queued["id"]
        other = server.client.post("/api/train-jobs", json=job(groups[:1]), headers={"idempotency-key": "two"})
        assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_conflict")
        assert server.end_of(first["id"])["result"]["step"] == 1
        assert server.end_of(queued["id"])["result"]["step"] == 2


def test_a_pinned_version_answers_as_it_did_before_training(recorded: tuple[Path, Any], tmp_path: Path) -> None:
    home = tmp_path / "home"
    shutil.copytree(recorded[0], home)
    ask = {
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 8,
        "temperature": 0,
        "logprobs": True,
        "return_token_ids": True,
    }

    def logprobs(server: ServerProcess, model: str) -> tuple[int, list[float]]:
        reply = server.post("/v1/chat/completions", {"model": model, **ask})
        return reply["policy_version"], [token["logprob"] for token in reply["choices"][0]["logprobs"]["content"]]

    with ServerProcess(home) as server:
        before = logprobs(server, POLICY)
        server.end_of(server.post("/api/train-jobs", job(recorded[1]))["id"])
        after, pinned = logprobs(server, POLICY), logprobs(server, f"{POLICY}@0")
        missing = server.client.post("/v1/chat/completions", json={"model": f"{POLICY}@9", **ask})
    assert (before[0], after[0], pinned[0]) == (0, 1, 0)
    assert pinned[1] == pytest.approx(before[1], abs=1e-5)
    assert after[1] != pytest.approx(before[1], abs=1e-3)
    assert missing.status_code == 404


def test_a_checkpoint_with_a_flipped_byte_is_not_served(recorded: tuple[Path, Any], tmp_path: Path) -> None:
    home = tmp_path / "home"
    shutil.copytree(recorded[0], home)
    weights = home / "checkpoints" / "test" / "agent" / "000000" / "adapter" / "adapter_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with ServerProcess(home) as server:
        answer = server.client.post("/v1/chat/completions", json={"model": POLICY, "messages": [{"role": "user", "content": "hello"}]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "checkpoint_corrupt")
    assert "adapter_model.safetensors" in answer.json()["error"]["message"]
