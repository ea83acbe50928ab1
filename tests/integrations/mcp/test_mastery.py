"""A mastery run from a server's name to its report, with a real MCP server and a model that plays by script; and its resume."""

from __future__ import annotations

import html
import json
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from support import mcp_servers
from support.client_server import ClientServer, client_server
from support.tiny_models import tiny_tokenizer

from apprentice.core.engines.protocol import PolicyVersion
from apprentice.core.errors import ConfigError, ToolServerError, UnknownModel
from apprentice.core.records import SamplingParams, Scenario, Trajectory
from apprentice.core.wire import GrpoJob, SftJob
from apprentice.integrations.mcp.commands import show_report
from apprentice.integrations.mcp.environment import SessionPool
from apprentice.integrations.mcp.mastery import MasterySettings, _backend, _resumed, epochs_for, make_scenarios, master
from apprentice.integrations.mcp.mastery_report import MasteryReport
from apprentice.integrations.mcp.scenarios import argument_values, notes_of, read_scenarios, write_scenarios
from apprentice.integrations.mcp.spec import McpServer, parse_server

TOKENIZER = tiny_tokenizer()
SMALL = MasterySettings(
    base_model="tiny", project="mcp", name="sums", scenarios=8, held_out=4, demonstrations=3, steps=2, group_size=2, groups_per_step=2,
    max_turns=3, concurrency=4,
)  # fmt: skip


class Pupil:
    """A model that does what the reference runs do; but before it was trained, it keeps the answers of all but the `gifted` requests."""

    def __init__(self) -> None:
        self.known: dict[str, tuple[str, str]] = {}
        """Request → the reply that calls the tool, and the answer."""
        self.gifted: set[str] = set()

    def learn(self, scenarios: Sequence[Scenario]) -> None:
        for scenario in scenarios:
            calls = scenario.metadata["calls"]
            assert isinstance(calls, list)
            call = calls[0]
            assert isinstance(call, dict)
            text = json.dumps({"name": call["tool"], "arguments": call["arguments"]})
            self.known[str(scenario.input)] = (f"<tool_call>\n{text}\n</tool_call>", f"The answer is {call['result']}.")

    def reply(self, prompt: Sequence[int], sampling: SamplingParams, version: PolicyVersion) -> list[int]:
        return [*TOKENIZER.encode(self._says(TOKENIZER.decode(prompt), version), add_special_tokens=False), TOKENIZER.eos_token_id]

    def _says(self, prompt: str, version: PolicyVersion) -> str:
        found = next(((request, pair) for request, pair in self.known.items() if request in prompt), None)
        if found is None:
            return "I do not know."
        request, (call, answer) = found
        if call not in prompt:
            return call
        return answer if version.version or request in self.gifted else "I do not know."


@pytest.fixture
def pupil() -> Pupil:
    return Pupil()


@pytest.fixture
def server(tmp_path: Path, pupil: Pupil) -> Iterator[ClientServer]:
    with client_server(tmp_path / "server", pupil.reply) as server:
        yield server


def calculator() -> McpServer:
    return parse_server(shlex.join(mcp_servers.argv("calculator")), isolation="shared")


async def test_a_run_goes_from_a_name_to_a_report_and_the_same_call_resumes(
    server: ClientServer, pupil: Pupil, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    async with SessionPool([calculator()]) as pool:
        train, test = await make_scenarios(pool, count=SMALL.scenarios, held_out=SMALL.held_out, progress=False)
    pupil.learn([*train, *test])
    report = await master([calculator()], SMALL, out, url=server.url, progress=False)
    assert (report.before.success, report.after.success, report.after.n) == (0.0, 1.0, len(test))
    assert report.warmup is not None
    assert report.warmup.success == 1.0
    assert report.per_tool == {"calculate": {"before": report.before, "warmup": report.warmup, "after": report.after}}
    assert report.gained
    assert read_scenarios(out / "scenarios" / "train.jsonl") == train
    values = [argument_values(scenario) for scenario in (*train, *test)]
    assert not set().union(*values[: len(train)]) & set().union(*values[len(train) :])
    sft, *grpo = server.jobs.requests
    assert isinstance(sft, SftJob)
    assert len(sft.demonstrations) == SMALL.demonstrations
    assert {str(shown.messages[1]["content"]) for shown in sft.demonstrations} <= {str(scenario.input) for scenario in train}
    assert sft.config.epochs == 1
    assert epochs_for([Scenario(input="x", metadata={"calls": [{"tool": f"t{n}"} for n in range(5)]})]) == 2
    assert all(isinstance(job, GrpoJob) for job in grpo)
    stored = json.loads((out / "report.json").read_text())
    assert stored["after"] == {"success": 1.0, "ci95": list(report.after.ci95), "n": report.after.n}
    assert MasteryReport.model_validate_json((out / "report.json").read_bytes()) == report
    page = (out / "report.html").read_text()
    assert "Success by tool" in page
    assert "do not overlap" in page
    # The warm-up's adapter already solves everything, and what is no better does not take its place.
    assert (report.adapter_step, report.adapter_stage) == (1, "warmup")
    assert "policy step 1, after the warm-up" in page
    show_report(report, out)
    assert "The adapter (policy step 1, after the warm-up), in plain PEFT format" in capsys.readouterr().out
    assert page.count("<h4>before · success 0</h4>") == page.count("<h4>after GRPO · success 1</h4>") == len(test)
    call = notes_of(test[0]).calls[0]
    assert html.escape(f"{call.tool}({json.dumps(call.arguments)}) → {call.result}") in page
    assert f"100% [{report.warmup.ci95[0]:.0%}, 100%] after the warm-up" in page
    assert f"The run ended because the budget of {SMALL.steps} step" in page
    jobs = len(server.jobs.requests)
    roomier = SMALL.model_copy(update={"train": SMALL.train.model_copy(update={"activation_memory_gib": 5.0})})
    assert _resumed(out, roomier, [calculator()]) == SMALL  # else a job submitted before a kill would not be found again
    assert (await master([calculator()], SMALL, out, url=server.url, progress=False)).after == report.after
    assert len(server.jobs.requests) == jobs
    longer = SMALL.model_copy(update={"steps": SMALL.steps + 1})
    assert (await master([calculator()], longer, out, url=server.url, progress=False)).steps == SMALL.steps + 1
    with pytest.raises(ConfigError, match=r"other settings \(demonstrations\)"):
        await master([calculator()], SMALL.model_copy(update={"demonstrations": 1}), out, url=server.url, progress=False)


async def test_nothing_of_the_held_out_set_is_trained_on_and_it_is_answered_greedily(
    server: ClientServer, pupil: Pupil, tmp_path: Path
) -> None:
    async with SessionPool([calculator()]) as pool:
        train, test = await make_scenarios(pool, count=SMALL.scenarios, held_out=SMALL.held_out, progress=False)
    pupil.learn([*train, *test])
    trained, held_out = {scenario.id for scenario in train}, {scenario.id for scenario in test}
    pupil.gifted = {str(scenario.input) for scenario in (*train[::2], *test[::2])}
    report = await master([calculator()], SMALL, tmp_path / "out", url=server.url, progress=False)
    sft, *grpo = server.jobs.requests
    assert isinstance(sft, SftJob)
    assert {str(shown.messages[1]["content"]) for shown in sft.demonstrations} <= {str(scenario.input) for scenario in train}
    attempts = [member.id for job in grpo if isinstance(job, GrpoJob) for group in job.groups for member in group]
    assert len(attempts) == SMALL.steps * SMALL.groups_per_step * SMALL.group_size
    assert {server.stored(attempt).scenario_id for attempt in attempts} <= trained
    runs: dict[str | None, list[Trajectory]] = defaultdict(list)
    for summary in server.server.ledger.trajectories("mcp/sums", limit=1000):
        purpose = summary.metadata.get("purpose")
        runs[str(purpose) if purpose else None].append(server.stored(summary.id))
    assert {run.id for run in runs[None]} == set(attempts)
    # The right call with a wrong answer earns credit while training, and none in an evaluation.
    before = [run for run in runs["evaluation"] if run.completions[0].policy_version == 0]
    assert {run.scenario_id: run.reward for run in before} == {s.id: float(str(s.input) in pupil.gifted) for s in test}
    assert report.before.success == 0.5
    # The curriculum asks the base model first, at each training scenario twice.
    measured = Counter(run.scenario_id for run in runs["difficulty"])
    assert measured == dict.fromkeys(trained, 2)
    assert {run.reward == 1.0 for run in runs["difficulty"]} == {True, False}
    assert all(run.reward for run in runs["difficulty"])
    assert {run.scenario_id for run in runs["evaluation"]} == held_out
    temperatures = {name: {call.sampling.temperature for run in found for call in run.completions} for name, found in runs.items()}
    assert temperatures == {"evaluation": {0.0}, "difficulty": {1.0}, None: {1.0}}


async def test_a_run_that_fails_before_it_began_does_not_stand_in_the_way_of_the_right_one(server: ClientServer, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ToolServerError, match="nosuchcmd"):
        await master([parse_server("nosuchcmd")], SMALL, out, url=server.url, progress=False)
    assert not out.exists()
    unknown = SMALL.model_copy(update={"base_model": "nosuchmodel"})
    with pytest.raises(UnknownModel):
        await master([calculator()], unknown, out, url=server.url, progress=False)
    assert not out.exists()  # the model was asked for before scenarios were made
    assert (await master([calculator()], SMALL, out, url=server.url, progress=False)).steps == SMALL.steps


async def test_a_home_that_was_made_for_nothing_is_removed_and_one_with_a_run_stays(tmp_path: Path) -> None:
    home = tmp_path / "home"
    async with _backend(tmp_path, None):
        (home / "checkpoints").mkdir(parents=True)
    assert not home.exists()
    home.mkdir()
    async with _backend(tmp_path, None):
        pass  # it was there before
    assert home.exists()
    home.rmdir()
    async with _backend(tmp_path, None):
        home.mkdir()
        (tmp_path / "config.json").write_text("{}")
    assert home.exists()


async def test_tool_calls_of_a_run_lie_in_the_trajectories_with_their_outcome(server: ClientServer, pupil: Pupil, tmp_path: Path) -> None:
    async with SessionPool([calculator()]) as pool:
        pupil.learn([scenario for part in await make_scenarios(pool, count=8, held_out=4, progress=False) for scenario in part])
    await master([calculator()], SMALL.model_copy(update={"name": "seen", "steps": 1}), tmp_path / "out", url=server.url, progress=False)
    job = server.jobs.requests[-1]
    assert isinstance(job, GrpoJob)
    for member in (member for group in job.groups for member in group):
        stored = server.stored(member.id)
        assert [(event.name, event.outcome) for event in stored.tool_events] == [("calculate", "ok")]
        assert stored.metrics["success"] == 1.0
        assert member.reward == stored.reward == max(stored.reward, 0.9)


async def test_a_run_that_would_change_its_owners_data_is_refused_even_with_scenarios_of_their_own(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "scenarios").mkdir(parents=True)
    for part in ("train", "test"):
        write_scenarios(out / "scenarios" / f"{part}.jsonl", [Scenario(input="Write it down.", metadata={"calls": []})])
    spec = parse_server(shlex.join(mcp_servers.hostile("keeps_notes", str(tmp_path / "notes.txt"))), name="notes")
    with pytest.raises(ConfigError, match=r"'notes' has tools that may change data .* \(write_note\): write \{workdir\} in its command"):
        await master([spec], SMALL, out, url="http://127.0.0.1:9", progress=False)
    assert not (tmp_path / "notes.txt").exists()
