"""Policies, train jobs and checkpoints in the ledger."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

import pytest
from support.recordings import POLICY, reread

from apprentice.core.config import AdapterConfig
from apprentice.core.errors import Conflict, IdempotencyConflict, ModelMismatch
from apprentice.core.records import TrainResult, TrainStatus
from apprentice.core.server.ledger import Ledger
from apprentice.core.wire import CheckpointInfo, RegisterModel, TrainJob


def job(**fields: Any) -> TrainJob:
    now = time.time()
    defaults: dict[str, Any] = {"id": "job-1", "policy": POLICY, "kind": "grpo", "state": "queued", "phase": "queued"}
    return TrainJob(**{**defaults, "created_at": now, "updated_at": now, **fields})


def test_a_policy_is_registered_once_and_never_differently(ledger: Ledger) -> None:
    body = RegisterModel(project="mail", name="agent-001", base_model="Qwen/Qwen3-8B")
    assert ledger.put_policy(body)
    assert not ledger.put_policy(body)
    with pytest.raises(ModelMismatch, match="adapter"):
        ledger.put_policy(body.model_copy(update={"adapter": AdapterConfig(rank=4)}))
    assert ledger.policies() == (body,)
    assert ledger.policy(POLICY) == body


def test_an_idempotency_key_gives_the_same_job_for_the_same_body_only(ledger: Ledger) -> None:
    first = ledger.create_job(job(), b'{"a": 1}', "key")
    assert ledger.create_job(job(id="job-2"), b'{"a": 1}', "key") == first
    with pytest.raises(IdempotencyConflict, match="key"):
        ledger.create_job(job(id="job-3"), b'{"a": 2}', "key")
    with pytest.raises(Conflict, match="job-1"):
        ledger.create_job(job(), b"{}", None)
    assert ledger.jobs() == (first,)
    assert ledger.job_request("job-1") == b'{"a": 1}'


def test_a_job_moves_until_it_has_ended_and_never_after(ledger: Ledger) -> None:
    made = ledger.create_job(job(created_at=1.0, updated_at=1.0), b"{}")
    running = ledger.update_job("job-1", state="running", phase="loading")
    assert (running.state, running.phase, running.updated_at > made.updated_at) == ("running", "loading", True)
    result = TrainResult(job_id="job-1", policy=POLICY, status=TrainStatus.trained, previous_step=0, step=1, metrics={"kl": math.nan})
    ended = ledger.update_job("job-1", state="trained", phase="done", result=result)
    assert ledger.update_job("job-1", state="trained", phase="done", result=result) is not None
    with pytest.raises(Conflict, match="ended as trained"):
        ledger.update_job("job-1", state="failed")
    assert ledger.jobs("running") == ()
    with reread(ledger) as reader:
        assert reader.job("job-1").model_dump_json() == ended.model_dump_json()


def test_events_of_a_job_are_numbered_without_gaps_from_many_threads(ledger: Ledger) -> None:
    ledger.create_job(job(), b"{}")
    threads = [threading.Thread(target=ledger.append_event, args=("job-1", "progress", {"n": n})) for n in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events = ledger.events("job-1")
    assert [event.seq for event in events] == list(range(1, 21))
    assert {event.data["n"] for event in events} == set(range(20))
    assert ledger.events("job-1", after=18) == events[18:]


def test_checkpoints_mirror_the_folders(ledger: Ledger) -> None:
    made = [CheckpointInfo(policy=POLICY, step=n, path=f"/c/{n}", created_at=float(n), metrics={"r": n / 2}) for n in (1, 2, 3)]
    for one in (*made, made[0]):
        ledger.put_checkpoint(one)
    ledger.mark_checkpoint(POLICY, 2, pinned=True)
    ledger.mark_checkpoint(POLICY, 3, deleted=True)
    expected = (made[0], made[1].model_copy(update={"pinned": True, "latest": True}))
    assert ledger.checkpoints(POLICY) == expected
    assert ledger.checkpoints() == expected
    ledger.put_checkpoint(made[2])
    assert [one.latest for one in ledger.checkpoints()] == [False, False, True]


def test_the_job_of_a_key_is_found(ledger: Ledger) -> None:
    ledger.create_job(job(), b"{}", "key")
    assert (ledger.job_of_key("key"), ledger.job_of_key("other")) == ("job-1", None)
