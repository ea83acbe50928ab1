"""`apprentice eval` and `TrainableModel.attach`: names, functions and files that cannot be used, and one real evaluation."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.client_server import QUICK, ClientServer, client_server
from support.server_process import KEY, ServerProcess

from apprentice import RemoteBackend, TrainableModel
from apprentice.cli import main
from apprentice.core.client.eval_command import load_function, read_scenarios, run_evaluation
from apprentice.core.client.evaluate import Evaluation
from apprentice.core.client.model import parse_policy
from apprentice.core.errors import ConfigError, InvalidRequest, UnknownCheckpoint, UnknownModel
from apprentice.core.server.ledger import Ledger

ROLLOUTS = '''
import os

async def length(model, scenario):
    """The reward is the scenario's number, once the model has answered."""
    async with model.trajectory(scenario) as t:
        client = model.openai_client()
        messages = [{"role": "user", "content": "hello"}]
        await client.chat.completions.create(model=model.inference_name, messages=messages, max_tokens=2)
        t.reward = scenario.input["worth"]
    return t

async def broken(model, scenario):
    raise ValueError("the mailbox is empty")

def plain(model, scenario):
    return None

class Grader:
    async def __call__(self, model, scenario):
        return await length(model, scenario)

grader = Grader()
number = 3
'''


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the user's modules, from which the command is run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "users_rollouts.py").write_text(ROLLOUTS)
    (tmp_path / "users_slip.py").write_text("def broken(:\n")
    (tmp_path / "users_crash.py").write_text("1 / 0\n")
    yield tmp_path
    sys.modules.pop("users_rollouts", None)


# Scenarios


def test_a_scenario_file_holds_scenarios_and_plain_inputs(tmp_path: Path) -> None:
    path = tmp_path / "held_out.jsonl"
    lines = ['{"id": "a", "input": 1, "metadata": {"level": 2}}', "", '"one\u2028line"', '{"question": "why?"}\r', "[1, 2]"]
    path.write_bytes(b"\xef\xbb\xbf" + "\n".join(lines).encode())
    found = read_scenarios(path)
    assert [scenario.input for scenario in found] == [1, "one\u2028line", {"question": "why?"}, [1, 2]]
    assert (found[0].id, found[0].metadata) == ("a", {"level": 2})


def test_a_scenario_without_an_id_gets_the_same_one_each_time(tmp_path: Path) -> None:
    path = tmp_path / "held_out.jsonl"
    path.write_text('1\n{"input": 2}\n3\n')
    ids = [scenario.id for scenario in read_scenarios(path)]
    assert len(set(ids)) == 3
    path.write_text('3\n{"input": 2}\n1\n')
    assert [scenario.id for scenario in read_scenarios(path)] == ids[::-1]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'{"input": 1}\n{"input": 1,}\n', "line 2 is not JSON"),
        (b'1\n\n{"input": 1, "expected": 2}\n', "line 3: expected: Extra inputs"),
        (b'{"id": "../x", "input": 1}\n', "line 1: id: "),
        (b'1\n"\xff"\n', "line 2 is not JSON: 'utf-8' codec"),
        (b'{"input": NaN}', "line 1 is not JSON: NaN is no JSON number"),
        (b"[" * 100_000, "line 1 is not JSON: maximum recursion"),
        (b'{"id": "a", "input": 1}\n{"id": "a", "input": 2}', "line 2: the id 'a' was given before"),
        (b"\n \n", "has no scenario"),
        (b"", "has no scenario"),
    ],
)
def test_a_bad_scenario_file_names_the_line(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "held_out.jsonl"
    path.write_bytes(content)
    with pytest.raises(InvalidRequest) as refused:
        read_scenarios(path)
    assert expected in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_scenario_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_scenarios(tmp_path / "nowhere.jsonl")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_scenarios(tmp_path)


# Functions


def test_async_functions_and_async_callables_are_rollouts() -> None:
    assert load_function("users_rollouts:length").__name__ == "length"
    assert type(load_function("users_rollouts:grader")).__name__ == "Grader"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("users_rollouts", "a function is named module:function"),
        (":length", "a function is named module:function"),
        ("users_rollouts:", "a function is named module:function"),
        ("no_such_module_here:f", "cannot be imported: ModuleNotFoundError"),
        ("..relative:f", "cannot be imported"),
        ("users_slip:broken", "cannot be imported: SyntaxError"),
        ("users_crash:f", "cannot be imported: ZeroDivisionError: division by zero"),
        ("users_rollouts:absent", "has no function 'absent'"),
        ("users_rollouts:number", "has no function 'number'"),
        ("users_rollouts:plain", "a rollout is an async function"),
    ],
)
def test_a_function_that_cannot_be_used_is_one_sentence(name: str, expected: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_function(name)
    assert expected in str(refused.value)
    assert "\n" not in str(refused.value)


# Names


def test_a_policy_name_may_pin_a_step() -> None:
    assert parse_policy("mail/agent") == ("mail/agent", None)
    assert parse_policy("mail/agent@12") == ("mail/agent", 12)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "mail",
        "mail/",
        "/agent",
        "a/b/c",
        "../agent",
        "mail/..",
        "mail/agent@",
        "mail/agent@x",
        "mail/agent@-1",
        "mail/agent@٣",
        "a/b\n",
    ],
)
def test_what_is_no_policy_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="a policy is named project/name or project/name@step"):
        parse_policy(name)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientServer]:
    with client_server(tmp_path_factory.mktemp("server")) as running:
        yield running


async def test_attach_gives_a_registered_policy_by_name(server: ClientServer) -> None:
    registered = await server.model("attached")
    async with RemoteBackend(server.url, retry=QUICK) as backend:
        model = await TrainableModel.attach(backend, "mail/attached")
        assert (model.policy, model.base_model, model.info) == (registered.policy, registered.base_model, registered.info)
        assert model.inference_name == "mail/attached"
        assert await model.get_step() == 0
        with pytest.raises(UnknownModel, match="mail/nobody"):
            await TrainableModel.attach(backend, "mail/nobody")
        with pytest.raises(UnknownCheckpoint, match="7"):
            await TrainableModel.attach(backend, "mail/attached@7")


async def test_attach_refuses_what_is_no_name_before_it_asks_the_backend() -> None:
    with pytest.raises(ConfigError, match="project/name"):
        await TrainableModel.attach(RemoteBackend("http://127.0.0.1:1"), "../api/models")


# Evaluations


async def test_without_a_url_the_home_must_exist_and_no_server_is_started(tmp_path: Path) -> None:
    (tmp_path / "held_out.jsonl").write_text("1\n")
    with pytest.raises(ConfigError, match="there is no ledger in nowhere"):
        await run_evaluation("mail/a", "users_rollouts:length", tmp_path / "held_out.jsonl", url=None, home=Path("nowhere"))
    assert not (tmp_path / "nowhere").exists()


def test_an_evaluation_on_a_real_server_from_the_command_line(
    tmp_path: Path, tiny_llama_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "held_out.jsonl").write_text('{"id": "low", "input": {"worth": 0.25}}\n{"id": "high", "input": {"worth": 0.75}}\n')

    def command(model: str, *options: str) -> tuple[int, str, str]:
        line = ["apprentice", "eval", model, "--scenarios", "held_out.jsonl", *options]
        monkeypatch.setattr(sys, "argv", line if "--rollout" in options else [*line, "--rollout", "users_rollouts:length"])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    monkeypatch.setenv("APPRENTICE_API_KEY", KEY)
    home = tmp_path / "home"
    with ServerProcess(home) as running:
        running.post("/api/models", {"project": "mail", "name": "agent", "base_model": str(tiny_llama_folder)})
        url = ("--url", str(running.client.base_url))
        code, out, _ = command("mail/agent@0", *url, "--repeats", "2", "--out", "found.json")
        assert (code, out.startswith("mail/agent@0: 0.500 [")) == (0, True)
        found = Evaluation.model_validate_json((tmp_path / "found.json").read_bytes())
        assert (found.n, found.mean, found.values) == (2, 0.5, {"low": 0.25, "high": 0.75})
        assert len(running.get("/api/trajectories?policy=mail/agent")) == 4
        for model, options, expected in (
            ("mail/nobody", (), "mail/nobody"),
            ("mail/agent@9", (), "no checkpoint of step 9"),
            ("../agent", (), "a policy is named project/name"),
            ("mail/agent", ("--out", "no/folder.json"), "--out goes to a file"),
            ("mail/agent", ("--rollout", "users_rollouts:broken"), "the mailbox is empty"),
        ):
            code, out, err = command(model, *url, *options)
            assert (code, out) == (2, "")
            said = [line for line in err.splitlines() if line.startswith("error: ")]
            assert len(said) == 1, err
            assert expected in said[0]
            assert "Traceback" not in err
        code, _, err = command("mail/agent", "--home", str(home))
        assert code == 2
        assert re.fullmatch(r"error: the server for .* did not start: the ledger .* is in use by process \d+: .*\n", err)
        monkeypatch.setenv("APPRENTICE_API_KEY", "another-key-for-tests")
        code, _, err = command("mail/agent", *url)
        assert code == 2
        assert err == "error: the API key in the `Authorization` header is not the key of this server\n"
    with Ledger.open(home / "ledger.sqlite", read_only=True) as ledger:
        statuses = {t.status.value: json.dumps(t.scenario_id) for t in ledger.trajectories("mail/agent")}
    assert set(statuses) == {"finished"}
