"""Exports hold everything that was recorded, bit for bit, in either format."""

from __future__ import annotations

import json
import math
import os
import tracemalloc
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from support.recordings import POLICY, completion, recorded

from apprentice.core.errors import InvalidRequest
from apprentice.core.records import ChatRequest, Completion, Origin, SamplingParams, Trajectory
from apprentice.core.server import export, ledger_expansion
from apprentice.core.server.export import SCHEMA, export_runs
from apprentice.core.server.ledger import Ledger
from apprentice.core.wire import FinishTrajectory

FORMATS = ["parquet", "jsonl"]
CONTEXT = ("completion_reward", "reward", "status", "error", "scenario_id", "group_id", "metrics", "metadata")


def imported(path: Path, format: str) -> list[tuple[Completion, dict[str, Any]]]:
    """The records and what is said of them, read from the file alone."""
    if format == "jsonl":
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        return [(Completion.model_validate(line.pop("completion")), line) for line in lines]
    rows: list[tuple[Completion, dict[str, Any]]] = []
    for row in pl.read_parquet(path).to_dicts():
        said = {name: row.pop(name) for name in CONTEXT}
        said |= {name: json.loads(said[name]) for name in ("metrics", "metadata") if said[name] is not None}
        request = ChatRequest(
            messages=json.loads(row.pop("messages")),
            tools=json.loads(row.pop("tools")),
            tool_choice=json.loads(row.pop("tool_choice") or "null"),
            response_format=json.loads(row.pop("response_format") or "null"),
        )
        parsed = {name: json.loads(row.pop(name)) for name in ("sampling", "message", "origin")}
        rows.append((Completion.model_validate({**row, **parsed, "request": request}), said))
    return rows


@pytest.mark.parametrize("format", FORMATS)
def test_an_export_read_back_equals_what_was_recorded(ledger: Ledger, tmp_path: Path, format: Any) -> None:
    made = recorded(ledger, 3)
    trajectory = ledger.open_trajectory(Trajectory(policy=POLICY, scenario_id="s1", group_id="g1", metadata={"é": ["\n", None]}))
    odd = completion(
        trajectory.id,
        prompt=(0, 2**32 - 1),
        logprobs=(-math.pi, -math.inf),
        sampling_logprobs=(-0.0, -1e-300),
        policy_version=None,
        origin=Origin(node="plan", lineage={1: made[0].id}, extra={"k": 1.5}),
        sampling=SamplingParams(temperature=0.7, seed=2**40, stop=("\n\n",)),
        request=ChatRequest(
            messages=({"role": "user", "content": "naïve 🙂 \u2028 \x00"},), tool_choice="none", response_format={"type": "text"}
        ),
        message={"role": "assistant", "content": None, "n": 1.0},
    )
    unattributed = completion(None, ())
    ledger.append_completions([odd])
    ledger.append_completions([unattributed])
    ledger.finish_trajectory(trajectory.id, FinishTrajectory(reward=-0.1, completion_rewards={odd.id: 0.3}, metrics={"turns": 1}))
    assert export_runs(ledger, tmp_path / "out", format) == 5
    rows = imported(tmp_path / "out", format)
    assert [one for one, _ in rows] == [*made, odd, unattributed]
    assert math.copysign(1, rows[3][0].sampling_logprobs[0]) == -1
    assert rows[3][1] == {
        "completion_reward": 0.3,
        "reward": -0.1,
        "status": "finished",
        "error": None,
        "scenario_id": "s1",
        "group_id": "g1",
        "metrics": {"turns": 1.0},
        "metadata": {"é": ["\n", None]},
    }
    assert rows[4][1] == dict.fromkeys(CONTEXT)
    assert sorted(entry.name for entry in tmp_path.iterdir() if "out" in entry.name) == ["out"]


@pytest.mark.parametrize("format", FORMATS)
def test_a_policys_export_holds_its_trajectories_whole_and_no_other_policy(ledger: Ledger, tmp_path: Path, format: Any) -> None:
    made = recorded(ledger, 2)
    judge = completion(made[0].trajectory_id, policy="base-model", policy_version=None)
    ledger.append_completions([judge])
    ledger.append_completions([completion(None, policy="mail/other")])
    assert export_runs(ledger, tmp_path / "out", format, policy=POLICY) == 3
    assert [one for one, _ in imported(tmp_path / "out", format)] == [*made, judge]


@pytest.mark.parametrize("format", FORMATS)
def test_an_empty_ledger_gives_an_empty_file_that_can_be_read(ledger: Ledger, tmp_path: Path, format: Any) -> None:
    assert export_runs(ledger, tmp_path / "out", format) == 0
    assert imported(tmp_path / "out", format) == []
    if format == "parquet":
        assert pl.read_parquet_schema(tmp_path / "out") == SCHEMA


@pytest.mark.parametrize("format", FORMATS)
def test_the_suffix_says_the_format_when_nothing_else_does(ledger: Ledger, tmp_path: Path, format: str) -> None:
    made = recorded(ledger, 1)
    assert export_runs(ledger, tmp_path / f"runs.{format}") == 1
    assert [one for one, _ in imported(tmp_path / f"runs.{format}", format)] == made
    with pytest.raises(InvalidRequest, match=r"runs\.csv"):
        export_runs(ledger, tmp_path / "runs.csv")


def test_numbers_are_numbers_in_parquet(ledger: Ledger, tmp_path: Path) -> None:
    recorded(ledger, 2)
    export_runs(ledger, tmp_path / "runs.parquet", "parquet")
    assert pl.scan_parquet(tmp_path / "runs.parquet").select(pl.col("token_ids").list.len().sum()).collect().item() == 16
    assert pl.read_parquet_schema(tmp_path / "runs.parquet") == SCHEMA


@pytest.mark.parametrize("format", FORMATS)
def test_lone_surrogates_survive_an_export(ledger: Ledger, tmp_path: Path, format: Any) -> None:
    one = completion(None, message={"role": "assistant", "content": "half \ud800", "\udfff": 1})
    ledger.append_completions([one])
    export_runs(ledger, tmp_path / "out", format)
    assert imported(tmp_path / "out", format)[0][0] == one


@pytest.mark.parametrize("format", FORMATS)
def test_an_export_of_many_batches_is_in_order_and_its_memory_is_bounded(
    ledger: Ledger, tmp_path: Path, format: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "_PIECE_BYTES", 100_000)
    monkeypatch.setattr(ledger_expansion, "_CACHE_BYTES", 20_000)
    monkeypatch.setattr(ledger_expansion, "_CACHED_BLOBS", 50)
    peaks: list[int] = []
    for rollouts in (8, 16):
        for _ in range(rollouts):
            recorded(ledger, 8)
        tracemalloc.start()
        written = export_runs(ledger, tmp_path / "out", format)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    expected = [one.id for batch in ledger.scan() for one in batch]
    assert written == len(expected) == 192
    assert [one.id for one, _ in imported(tmp_path / "out", format)] == expected
    assert peaks[1] < 1.5 * peaks[0]


@pytest.mark.parametrize(
    ("format", "target", "said"), [("csv", "out", "csv"), ("jsonl", "missing/out", "missing"), ("jsonl", ".", "existing folder")]
)
def test_an_export_that_cannot_be_made_is_one_sentence(ledger: Ledger, tmp_path: Path, format: Any, target: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        export_runs(ledger, tmp_path / target, format)


def test_a_failing_export_leaves_the_old_file_and_no_remains(ledger: Ledger, tmp_path: Path) -> None:
    recorded(ledger, 2)
    folder = tmp_path / "exports"
    folder.mkdir()
    (folder / "out").write_text("old")
    ledger.close()
    with pytest.raises(Exception, match="closed"):
        export_runs(ledger, folder / "out", "parquet")
    assert os.listdir(folder) == ["out"]
    assert (folder / "out").read_text() == "old"
