"""The examples and the README's code run as they stand, on a tiny random model instead of the built-in one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import calendar_agent  # noqa: E402

ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "COLUMNS": "120"}


def run(*command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=280)


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_demonstration_of_each_question_earns_the_whole_reward(split: str) -> None:
    for scenario in calendar_agent.make_scenarios(split, 40, seed=5):
        call = calendar_agent.demonstration(scenario).messages[2]["tool_calls"][0]["function"]
        result, ok = calendar_agent.call_tool(call["name"], call["arguments"])
        assert ok
        reward, success = calendar_agent.grade(scenario, f"The answer is {result}.", [(call["name"], result)])
        assert (round(reward, 9), success) == (1.0, True)


def test_held_out_questions_share_no_date_and_no_wording_with_training() -> None:
    def dates_and_words(split: str, seeds: list[int]) -> tuple[set[str], set[str]]:
        questions = [str(s.input) for seed in seeds for s in calendar_agent.make_scenarios(split, 64, seed)]
        dates = {found for question in questions for found in re.findall(r"\d{4}-\d\d-\d\d", question)}
        return dates, {re.sub(r"[\d-]+", "#", question) for question in questions}

    (train_dates, train_words), (test_dates, test_words) = dates_and_words("train", [1, 3]), dates_and_words("test", [2])
    assert train_dates & test_dates == set()
    assert train_words & test_words == set()


def test_a_wrong_answer_earns_less_and_a_hallucinated_tool_is_told() -> None:
    scenario = calendar_agent.make_scenarios("test", 1, seed=2)[0]
    assert calendar_agent.call_tool("add_years", "{}") == ("error: there is no tool add_years", False)
    assert calendar_agent.call_tool("weekday", "{")[1] is False
    assert calendar_agent.grade(scenario, str(scenario.metadata["expected"]), []) == (0.0, False)


def test_the_demo_runs_to_its_table_and_goes_on_where_it_stopped(tiny_llama_folder: Path, tmp_path: Path) -> None:
    arguments = ["--home", str(tmp_path / "home"), "--base-model", str(tiny_llama_folder), "--steps", "1"]
    arguments += ["--demonstrations", "8", "--held-out", "4"]
    first = run(str(ROOT / "examples" / "calendar_agent.py"), *arguments, folder=tmp_path)
    assert first.returncode == 1, first.stderr  # a random model learns nothing in a step, and the demo says so
    assert "No significant gain" in first.stdout
    assert "after the warm-up" in first.stdout
    adapter = re.search(r"PEFT format: (\S+)", first.stdout)
    assert adapter is not None
    assert (Path(adapter[1]) / "adapter_model.safetensors").is_file()
    assert (tmp_path / "home" / "run" / "report.html").read_text().startswith("<!doctype html>")
    again = run(str(ROOT / "examples" / "calendar_agent.py"), *arguments, folder=tmp_path)
    assert again.stdout == first.stdout


def test_the_readme_s_code_trains_an_agent(tiny_llama_folder: Path, tmp_path: Path) -> None:
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block is not None
    script = tmp_path / "readme.py"
    script.write_text(block[1].replace("smollm2-135m", str(tiny_llama_folder)))
    done = run(str(script), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"trained 1 -?\d+\.\d+\n", done.stdout), done.stdout
