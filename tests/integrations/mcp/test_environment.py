"""Environments and the pool: what a model's call becomes, what rollouts see of each other, what 200 of them leave."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sqlite3
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import mcp_servers

from apprentice.core.errors import ApprenticeError, ConfigError, ToolServerError
from apprentice.integrations.mcp import environment as environment_module
from apprentice.integrations.mcp.environment import McpEnvironment, SessionPool
from apprentice.integrations.mcp.explore import Exploration, explore
from apprentice.integrations.mcp.facts import facts_of
from apprentice.integrations.mcp.kinds import shape_of
from apprentice.integrations.mcp.redaction import MARK
from apprentice.integrations.mcp.scenarios import notes_of
from apprentice.integrations.mcp.session import McpSession
from apprentice.integrations.mcp.spec import McpServer, SetupCall
from apprentice.integrations.mcp.state import MOST_ROWS, folder_state
from apprentice.integrations.mcp.synthesize import synthesize
from apprentice.integrations.mcp.tools import McpTool


def hostile(script: str, *arguments: str, **options: Any) -> McpServer:
    return McpServer(command=tuple(mcp_servers.hostile(script, *arguments)), **options)


def real(name: str, **options: Any) -> McpServer:
    return McpServer(name=name, command=tuple(mcp_servers.argv(name)), env=mcp_servers.env(name), **options)


@asynccontextmanager
async def environment(*servers: McpServer, resources: bool = False) -> AsyncIterator[McpEnvironment]:
    async with SessionPool(servers, resources=resources) as pool, pool.environment() as env:
        yield env


def _processes() -> set[int]:
    """Our children of every generation, without zombies."""
    children = psutil.Process().children(recursive=True)
    return {child.pid for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE}


_others: set[int] = set()


@pytest.fixture(autouse=True)
def others() -> None:
    """What runs already, for other tests of this process."""
    _others.clear()
    _others.update(_processes())


def own_processes() -> list[int]:
    """Children that were started in this test and still run."""
    return sorted(_processes() - _others)


# ---- what a model's call becomes -----------------------------------------------------------------------------------------


async def test_a_call_is_known_by_the_name_and_arguments_that_the_model_wrote() -> None:
    async with environment(hostile("plain")) as env:
        for arguments in ('{"value": "hi"}', {"value": "hi"}):
            reply = await env.call("echo", arguments)
            assert (reply.outcome, reply.text, reply.function, reply.arguments) == ("ok", 'echo {"value": "hi"}', "echo", {"value": "hi"})
        for nothing in ("", "  ", None, "{}"):
            assert (await env.call("count", nothing)).ok


@pytest.mark.parametrize(
    ("function", "arguments", "says"),
    [
        ("writ_query", "{}", "There is no tool 'writ_query'. Did you mean write_query? The tools are: read_query, write_query,"),
        ("fly", {}, "There is no tool 'fly'. The tools are:"),
        ("write_query", '{"query": ', "The arguments must be a JSON object, and they are no JSON"),
        ("write_query", "[1]", "The arguments must be a JSON object, and they are [1]."),
        ("write_query", '"text"', 'The arguments must be a JSON object, and they are "text".'),
        ("write_query", "[" * 50_000, "The arguments must be a JSON object"),
        ("write_query", {}, "'query' is a required property"),
        ("write_query", {"query": 5}, "argument 'query': 5 is not of type 'string'"),
    ],
)
async def test_a_wrong_call_is_a_tool_error_and_the_server_is_not_asked(function: str, arguments: Any, says: str) -> None:
    async with environment(real("sqlite")) as env:
        before = len(env.sessions["sqlite"].frames)
        reply = await env.call(function, arguments)
        assert (reply.outcome, reply.function, says in reply.text) == ("tool_error", function, True)
        assert len(env.sessions["sqlite"].frames) == before
        assert (await env.call("list_tables", {})).ok  # the rollout goes on


async def test_other_breaches_of_the_schema_are_noted_and_left_to_the_server() -> None:
    async with environment(real("memory")) as env:
        reply = await env.call("read_graph", {"unknown": 1})
        assert (reply.outcome, reply.notes) == ("ok", ("against the schema: the argument 'unknown' is unknown",))


async def test_several_servers_are_one_set_of_tools() -> None:
    first, second = hostile("plain", name="a"), hostile("plain", name="b", allow=("echo", "count"), deny=("count",))
    async with environment(first, second) as env:
        assert env.toolset.names == ["a__echo", "a__count", "a__fail", "a__slow", "a__progress", "b__echo"]
        assert [(await env.call(name, {})).server for name in ("a__echo", "b__echo")] == ["a", "b"]
        assert (await env.call("b__count", {})).outcome == "tool_error"
        assert env.instructions == ""


async def test_documents_and_prompts_are_tools_if_asked() -> None:
    async with environment(real("sqlite"), resources=True) as env:
        assert env.toolset.names[-4:] == ["list_resources", "read_resource", "list_prompts", "get_prompt"]
        listed = await env.call("list_resources", {})
        assert json.loads(listed.text)[0]["uri"] == "memo://insights"
        read = await env.call("read_resource", {"uri": "memo://insights"})
        assert (read.outcome, read.text, read.tool) == ("ok", "No business insights have been discovered yet.", "read_resource")
        assert (await env.call("read_resource", {"uri": "memo://none"})).outcome in ("protocol_error", "tool_error")
        assert (await env.call("read_resource", {})).outcome == "tool_error"
        assert "mcp-demo" in (await env.call("list_prompts", {})).text
        assert (await env.call("get_prompt", {"name": "mcp-demo", "arguments": {"topic": "cats"}})).ok
    async with environment(real("sqlite")) as env:
        assert "read_resource" not in env.toolset.names


@pytest.mark.parametrize(
    ("server", "says"),
    [
        (hostile("no_tools"), "the server 'no_tools' lists no tools"),
        (hostile("only_hidden_tools"), "no tool of the server 'only_hidden_tools' can be shown to a model"),
        (hostile("plain", allow=("nothing*",)), "none of the 5 tools of the server 'plain' is left by allow"),
    ],
    ids=["none", "hidden", "denied"],
)
async def test_a_server_without_a_tool_for_the_model_is_one_sentence(server: McpServer, says: str) -> None:
    with pytest.raises(ApprenticeError, match=says):
        async with environment(server):
            pass
    assert own_processes() == []


# ---- what rollouts see of each other -------------------------------------------------------------------------------------


async def test_rollouts_on_sqlite_and_memory_at_the_same_time_do_not_see_each_other() -> None:
    async def rollout(pool: SessionPool, number: int, everyone: asyncio.Barrier) -> tuple[str, str]:
        async with pool.environment() as env:
            await env.call("sqlite__create_table", {"query": "create table things (name text)"})
            await everyone.wait()
            await env.call("sqlite__write_query", {"query": f"insert into things values ('mine {number}')"})
            entity = {"name": f"mine {number}", "entityType": "thing", "observations": []}
            await env.call("memory__create_entities", {"entities": [entity]})
            await everyone.wait()
            rows = await env.call("sqlite__read_query", {"query": "select * from things"})
            return rows.text, (await env.call("memory__read_graph", {})).text

    async with SessionPool([real("sqlite"), real("memory")]) as pool:
        everyone = asyncio.Barrier(3)
        seen = await asyncio.gather(*(rollout(pool, number, everyone) for number in range(3)))
    for number, (rows, graph) in enumerate(seen):
        assert rows == f"[{{'name': 'mine {number}'}}]"
        assert [entity["name"] for entity in json.loads(graph)["entities"]] == [f"mine {number}"]


async def test_calls_of_one_rollout_at_the_same_time_are_all_kept() -> None:
    """server-memory loses entities when it is written to in parallel: calls take turns."""
    async with environment(real("memory")) as env:
        entities = [{"name": f"e{number}", "entityType": "t", "observations": []} for number in range(20)]
        await asyncio.gather(*(env.call("create_entities", {"entities": [entity]}) for entity in entities))
        assert len(json.loads((await env.call("read_graph", {})).text)["entities"]) == 20


async def test_a_shared_server_is_one_session_for_all_and_a_new_one_if_it_is_lost() -> None:
    async with SessionPool([hostile("plain", isolation="shared")]) as pool:
        async with pool.environment() as one, pool.environment() as other:
            assert one.sessions["plain"] is other.sessions["plain"]
            assert [(await env.call("count", {})).text for env in (one, other)] == ["1", "2"]
        async with pool.environment() as env:
            assert (await env.call("count", {})).text == "3"
            pid = env.sessions["plain"].pid
            assert pid is not None
            os.killpg(pid, 9)
            assert (await env.call("count", {})).outcome == "server_lost"
        async with pool.environment() as env:
            assert (await env.call("count", {})).text == "1"
    assert own_processes() == []


# ---- state ---------------------------------------------------------------------------------------------------------------


async def test_two_runs_that_did_the_same_have_the_same_state_and_others_another() -> None:
    async def run(pool: SessionPool, order: list[int], text: str) -> Any:
        async with pool.environment() as env:
            await env.call("sqlite__create_table", {"query": "create table t (a int, b blob)"})
            for value in order:
                await env.call("sqlite__write_query", {"query": f"insert into t values ({value}, x'00ff')"})
            await env.call("filesystem__create_directory", {"path": "{workdir}/empty"})
            reply = await env.call("filesystem__write_file", {"path": "{workdir}/note.txt", "content": text})
            assert reply.text == "Successfully wrote to {workdir}/note.txt"
            return await env.state()

    async with SessionPool([real("sqlite"), real("filesystem")]) as pool:
        first, second, third = await asyncio.gather(run(pool, [1, 2], "x"), run(pool, [2, 1], "x"), run(pool, [1, 2], "y"))
    assert first == second != third
    assert first["filesystem"]["files"] == {"empty": "empty folder", "note.txt": "x"}
    blob = "sha256:06eb7d6a69ee19e5fbdf749018d3d2abfa04bcbd1365db312eb86dc7169389b8"
    tables = {"t": {"columns": ["a", "b"], "types": ["INTEGER", "BLOB"], "rows": [[1, blob], [2, blob]]}}
    assert first["sqlite"]["files"] == {"data.db": {"tables": tables}}
    assert first["sqlite"]["resources"] == {"memo://insights": "No business insights have been discovered yet."}


def test_the_state_of_a_folder_holds_whatever_lies_in_it(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "path.txt").write_text(f"in {tmp_path}/x")
    (tmp_path / "latin.txt").write_bytes(b"\xe9")
    (tmp_path / "large.txt").write_text("x" * 100_000)
    (tmp_path / "link").symlink_to(tmp_path / "deep")
    (tmp_path / "false.db").write_bytes(b"SQLite format 3\0 and no more")
    os.mkfifo(tmp_path / "pipe")
    with closing(sqlite3.connect(tmp_path / "w.db")) as database:
        database.execute("pragma journal_mode=wal")
        database.execute('create table "od""d" (a real, b text)')
        database.execute("create table big (a int)")
        database.execute("""insert into "od""d" values (1.5, null), (9e999, 'x')""")
        database.executemany("insert into big values (?)", [(number,) for number in range(MOST_ROWS + 1)])
        database.commit()
        found: Any = folder_state(tmp_path)  # while the database is open
    assert found["deep/er/path.txt"] == "in {workdir}/x"
    assert found["latin.txt"].startswith("sha256:")
    assert found["large.txt"].startswith("sha256:")
    assert found["link"] == "link to {workdir}/deep"
    assert found["false.db"] == "SQLite format 3\0 and no more"
    assert found["pipe"] == "no regular file"
    assert found["w.db"]["tables"]['od"d'] == {
        "columns": ["a", "b"],
        "types": ["REAL", "TEXT"],
        "rows": [["inf", "x"], [1.5, None]],
    }
    assert found["w.db"]["tables"]["big"]["rows"].startswith(f"{MOST_ROWS + 1} rows, sha256:")
    assert set(found) == {"deep/er/path.txt", "latin.txt", "large.txt", "link", "false.db", "pipe", "w.db"}


SHIPS = "create table ships (name text, price integer)"


@pytest.mark.parametrize(
    ("statements", "same"),
    [
        ([SHIPS], True),
        (["CREATE TABLE IF NOT EXISTS ships(name TEXT,\n  price INT)"], True),
        (["create table ships (name varchar(40), price integer)"], True),
        (["create table ships (name integer, price text)"], False),
        (["create table ships (name text, price real)"], False),
        (["create table ships (name, price)"], False),
        (["create table ships (name text primary key, price integer)"], False),
        (["create table ships (name text, price integer not null default 3)"], False),
        ([SHIPS, "create view cheap as select * from ships"], False),
        ([SHIPS, "create index by_price on ships (price)"], False),
        ([SHIPS, "create trigger t after insert on ships begin delete from ships; end"], False),
    ],
)
def test_the_state_of_a_database_is_all_that_is_declared_in_it(tmp_path: Path, statements: list[str], same: bool) -> None:
    for name, made in (("one", [SHIPS]), ("two", statements)):
        with closing(sqlite3.connect(tmp_path / name)) as database:
            for statement in made:
                database.execute(statement)
    found = folder_state(tmp_path)
    assert (found["one"] == found["two"]) is same


def test_how_a_view_is_spelled_is_no_part_of_a_state(tmp_path: Path) -> None:
    views = ("create view v as select name from ships where name = 'A'", "CREATE VIEW v AS\n SELECT  name FROM ships WHERE name='A'")
    for number, view in enumerate((*views, views[0].replace("'A'", "'a'"))):
        with closing(sqlite3.connect(tmp_path / str(number))) as database:
            database.execute(SHIPS)
            database.execute(view)
    found = folder_state(tmp_path)
    assert found["0"] == found["1"] != found["2"]


# ---- the pool ------------------------------------------------------------------------------------------------------------


async def test_sessions_are_kept_ready_in_advance_and_each_is_used_once() -> None:
    async with SessionPool([hostile("plain")], warm=2) as pool:
        pids: list[int | None] = []
        for _ in range(4):
            async with pool.environment() as env:
                assert (await env.call("count", {})).text == "1"
                pids.append(env.sessions["plain"].pid)
        assert len(set(pids)) == 4
    assert own_processes() == []


async def test_a_session_that_died_while_it_waited_is_not_given_out() -> None:
    async with SessionPool([hostile("plain")], warm=1) as pool:
        (task,) = pool._ready["plain"]  # pyright: ignore[reportPrivateUsage]
        waiting = await task
        assert waiting.pid is not None
        os.killpg(waiting.pid, 9)
        while waiting.alive:  # noqa: ASYNC110  # nothing tells of it
            await asyncio.sleep(0.01)
        async with pool.environment() as env:
            assert env.sessions["plain"] is not waiting
            assert (await env.call("count", {})).ok


async def test_no_more_servers_start_at_once_than_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    starting, most = 0, 0
    real_open = McpSession.open

    async def counted(self: McpSession) -> None:
        nonlocal starting, most
        starting += 1
        most = max(most, starting)
        try:
            await real_open(self)
        finally:
            starting -= 1

    monkeypatch.setattr(environment_module.McpSession, "open", counted)
    async with SessionPool([hostile("plain")], starts=2) as pool, AsyncExitStack() as stack:
        await asyncio.gather(*(stack.enter_async_context(pool.environment()) for _ in range(6)))
    assert most == 2


async def test_a_server_that_cannot_start_fails_the_environment_and_closes_the_others() -> None:
    for warm in (0, 1):
        async with SessionPool([hostile("plain"), hostile("dies_at_start")], warm=warm) as pool:
            with pytest.raises(ToolServerError, match="dies_at_start"):
                async with pool.environment():
                    pass
    assert own_processes() == []


async def test_a_setup_call_that_fails_is_one_sentence_and_leaves_nothing() -> None:
    server = hostile("plain", setup=(SetupCall(tool="fail"),))
    with pytest.raises(ToolServerError, match="the setup call 'fail' of the server 'plain' failed"):
        async with environment(server):
            pass
    assert own_processes() == []


@pytest.mark.parametrize("warm", [0, 1])
@pytest.mark.parametrize("after", [0.0, 0.03, 0.2])
async def test_cancelling_while_servers_start_leaves_nothing(after: float, warm: int) -> None:
    async def rollout(pool: SessionPool) -> None:
        async with pool.environment():
            await asyncio.sleep(60)

    async with SessionPool([hostile("plain"), hostile("never_answers")], warm=warm) as pool:
        task = asyncio.create_task(rollout(pool))
        await asyncio.sleep(after)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert own_processes() == []


async def test_an_error_of_the_rollout_goes_through_and_closes_the_environment() -> None:
    async with SessionPool([hostile("plain")]) as pool:
        with pytest.raises(ZeroDivisionError):
            async with pool.environment():
                raise ZeroDivisionError
        assert len(own_processes()) == 1  # the watchdog
    assert own_processes() == []


@pytest.mark.parametrize(
    ("servers", "options", "says"),
    [
        ([], {}, "there is none"),
        ([hostile("plain"), hostile("plain")], {}, "two are called 'plain'"),
        ([hostile("plain")], {"warm": -1}, "warm=-1"),
        ([hostile("plain")], {"starts": 0}, "starts=0"),
    ],
)
async def test_a_pool_that_cannot_be_is_one_sentence(servers: list[McpServer], options: dict[str, int], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        SessionPool(servers, **options)
    with pytest.raises(ConfigError, match="inside `async with`"):
        async with SessionPool([hostile("plain")]).environment():
            pass


@pytest.mark.slow
async def test_200_rollouts_in_a_row_leave_no_process_no_file_and_no_growing_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    server = hostile("spawns_children", "detached", env={"NOTES": str(tmp_path / "notes")})
    me = psutil.Process()
    memory = descriptors = 0
    async with SessionPool([server], warm=2) as pool:
        for index in range(200):
            async with pool.environment() as env:
                assert (await env.call("spawn", {})).ok
            if index == 20:
                gc.collect()
                memory, descriptors = me.memory_info().rss, me.num_fds()
        gc.collect()
        assert me.memory_info().rss - memory < 16 * 2**20
        assert me.num_fds() <= descriptors
        assert len(list((tmp_path / "temporary").glob("*/*"))) <= 2  # those that are kept ready
    children = [int(line) for line in (tmp_path / "notes").read_text().split()]
    assert len(children) == 200
    alive = [pid for pid in children if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
    assert (alive, own_processes(), list((tmp_path / "temporary").iterdir())) == ([], [], [])


async def test_a_secret_that_a_server_writes_or_tells_is_in_no_state_no_value_and_no_scenario() -> None:
    key = "sk-4711-very-secret"
    server = hostile("keeps_notes", "{workdir}/notes.txt", name="notes", env={"NOTES_KEY": key})
    async with SessionPool([server]) as pool:
        async with pool.environment() as env:
            assert (await env.call("write_note", {"content": "buy milk"})).ok
            assert await env.state() == {"notes": {"files": {"notes.txt": f"buy milk\n{MARK}\n"}}}
        found = await explore(pool)
        scenarios = await synthesize(pool, found, count=6, held_out=2)
    assert any(scenario.metadata["state"] for scenario in scenarios)
    told = "".join(scenario.model_dump_json() for scenario in scenarios)
    assert MARK in told
    assert key not in told
    asked = [notes_of(scenario) for scenario in scenarios]
    assert not [text for notes in asked for text in (*notes.facts, *(str(call.arguments) for call in notes.calls)) if MARK in text]


def test_what_was_redacted_is_no_fact_and_nothing_to_ask_about() -> None:
    tool = McpTool("s", "get_account", "The account.", {"type": "object", "properties": {}})
    shape = shape_of("get_account", tool)
    for result in (f'{{"name": "{MARK}"}}', f"account {MARK}", f"{MARK}\n{MARK}", f"[FILE] {MARK}"):
        assert facts_of(shape, 0, {}, result, [], []) == []
    (left,) = facts_of(shape, 0, {}, f"owner: Ada\nkey: {MARK}", [], [])
    assert left.text == "Ada"
    found = Exploration()
    found.add("name", f"account {MARK}")
    assert found.values["name"] == []
