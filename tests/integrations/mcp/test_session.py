"""One session: what a server may do to it, what it says when a server cannot be used, and that nothing of it is left."""

from __future__ import annotations

import asyncio
import datetime
import json
import logging
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import psutil
import pytest
from support import mcp_servers
from support.hostile_servers.http_faults import http_faults

from apprentice.core.errors import ConfigError, ToolServerError
from apprentice.integrations.mcp import processes as processes_module
from apprentice.integrations.mcp import session as session_module
from apprentice.integrations.mcp.diagnosis import Evidence, diagnose
from apprentice.integrations.mcp.processes import Lease, Place
from apprentice.integrations.mcp.redaction import MARK, Redactor
from apprentice.integrations.mcp.session import McpSession
from apprentice.integrations.mcp.spec import McpServer, SetupCall, parse_server

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")


def hostile(script: str, *arguments: str, **options: Any) -> McpServer:
    return McpServer(command=tuple(mcp_servers.hostile(script, *arguments)), **options)


def running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def refusal(server: McpServer) -> str:
    with pytest.raises((ToolServerError, ConfigError)) as caught:
        await McpSession(server).open()
    text = str(caught.value)
    assert "\n" not in text
    return text


# ---- working, also with servers that are not quite right -----------------------------------------------------------------


async def test_a_session_answers_and_leaves_no_process_and_no_file() -> None:
    session = McpSession(hostile("plain"))
    async with session:
        assert (session.alive, session.protocol, [tool.name for tool in session.tools][:2]) == (True, "2025-06-18", ["echo", "count"])
        reply = await session.call("echo", {"value": "hi"})
        assert (reply.outcome, reply.text, reply.server, reply.tool) == ("ok", 'echo {"value": "hi"}', "plain", "echo")
        assert (await session.call("fail", {})).outcome == "tool_error"
        refused = await session.call("refuse", {})
        assert (refused.outcome, refused.text) == ("protocol_error", "Unknown tool: refuse (error -32602)")
        folder, pid = session.workdir, session.pid
        assert folder is not None
        assert pid is not None
        assert folder.is_dir()
    assert not session.alive
    assert not running(pid)
    assert not folder.parent.parent.exists()
    assert (await session.call("echo", {})).outcome == "server_lost"


@pytest.mark.parametrize(
    ("name", "tool", "text", "repair"),
    [
        ("missing_type", "untyped", "untyped {}", "the tool 'absent' got the input schema that it lacks"),
        ("missing_capabilities", "echo", "echo {}", "the handshake's missing capabilities were taken for none"),
        ("bad_output_schema", "rows", "[1, 2]", "the output schema of the tool 'rows', which is not one of an object, was left out"),
        ("bad_output_schema", "promised", "no structure here", None),
        ("prints_banners", "echo", "echo {}", "*** Welcome to BannerServer 3000! ***"),
        ("duplicate_names", "go", "go {}", "the tool 'go' is listed twice, differently, and the first one was taken"),
        ("endless_pages", "tool_1", "tool_1 {}", "the pages of the tool list have no end, and reading stopped after 2"),
        ("bad_results", "string", "just text", "results whose content is no list were made one"),
        ("exits_on_unknown", "echo", "echo {}", None),
        ("changes_tools", "first", "first {}", "the server changed its tool list during the session, and the one from its start was kept"),
    ],
)
async def test_servers_with_faults_that_can_be_put_right_work_and_the_repair_is_told(
    name: str, tool: str, text: str, repair: str | None
) -> None:
    async with McpSession(hostile(name)) as session:
        reply = await session.call(tool, {})
        assert (reply.outcome, reply.text) == ("ok", text)
        assert repair is None or any(repair in sentence for sentence in session.repairs)


@pytest.mark.parametrize(("protocol", "outcome"), [("2026-07-28", "protocol_error"), ("2025-06-18", "tool_error")])
async def test_a_change_of_the_tool_list_that_nobody_is_told_of_is_found_when_a_tool_is_gone(protocol: str, outcome: str) -> None:
    async with McpSession(hostile("changes_tools_silently", protocol)) as session:
        assert session.protocol == protocol

        def listings() -> int:
            return sum(frame.direction == "out" and frame.message["method"] == "tools/list" for frame in session.frames)

        before = listings()
        assert (await session.call("lamp", {})).text == "Tool not found: a lamp needs no tool"  # and is a result
        assert (await session.call("never_listed", {})).outcome == outcome
        assert (await session.call("first", {})).ok
        assert (listings(), session.repairs) == (before, ())
        replies = [await session.call("first", {}) for _ in range(2)]
        assert {(reply.outcome, reply.notes) for reply in replies} == {(outcome, ("the server no longer lists this tool",))}
        assert session.repairs == ("the server changed its tool list during the session, and the one from its start was kept",)
        assert listings() == before + 1
        assert [tool.name for tool in session.tools] == ["first", "lamp"]


async def test_a_page_list_without_end_whose_cursors_are_all_new_is_cut() -> None:
    async with McpSession(hostile("endless_pages", "new")) as session:
        assert "reading stopped after 100" in session.repairs[0]
        assert len({tool.name for tool in session.tools}) == len(session.tools)


async def test_32_megabytes_in_one_line_are_a_result() -> None:
    async with McpSession(hostile("floods")) as session:
        reply = await session.call("flood", {})
        assert (reply.outcome, len(reply.full_text), len(reply.text) < 5_000) == ("ok", 32_000_000, True)
        assert sum(len(str(frame.message)) for frame in session.frames) < 5_000_000


async def test_failures_that_are_told_as_success_are_called_so() -> None:
    async with McpSession(hostile("lies_about_errors")) as session:
        outcomes = {name: (await session.call(name, {})).outcome for name in ("failed_query", "failed_json", "honest")}
    assert outcomes == {"failed_query": "reported_failure", "failed_json": "reported_failure", "honest": "ok"}


async def test_a_question_to_the_user_is_answered_the_same_way_every_time_and_noted() -> None:
    async with McpSession(hostile("elicits")) as session:
        replies = [await session.call("ask", {}) for _ in range(2)]
        assert [reply.text for reply in replies] == ['{"action": "decline"}'] * 2
        assert replies[1].notes == ("the server asked the user 'Who are you?', which was declined",)


async def test_a_form_with_defaults_for_all_it_needs_is_answered_with_them() -> None:
    from apprentice.integrations.mcp.connect import defaults_of

    fields: Any = {"name": {"type": "string", "default": "Ada"}, "age": {"type": "integer"}, "odd": {"default": {"a": 1}}}
    assert defaults_of({"properties": fields, "required": ["name"]}) == {"name": "Ada"}
    assert defaults_of({"properties": fields, "required": ["age"]}) is None
    assert defaults_of({"properties": fields, "required": ["odd"]}) is None
    assert defaults_of({}) == {}


# ---- calls that fail -----------------------------------------------------------------------------------------------------


async def test_a_call_that_is_not_answered_is_a_timeout_and_the_session_goes_on() -> None:
    async with McpSession(hostile("plain")) as session:
        reply = await session.call("slow", {"seconds": 1}, seconds=0.2)
        assert (reply.outcome, reply.text) == ("timeout", "the server 'plain' did not answer within 0.2 s")
        assert (await session.call("echo", {})).ok


@pytest.mark.parametrize("name", ["never_answers", "answers_garbage"])
async def test_silence_and_garbage_instead_of_an_answer_are_timeouts(name: str) -> None:
    async with McpSession(hostile(name, "calls")) as session:
        assert (await session.call("ask", {}, seconds=0.3)).outcome == "timeout"


async def test_a_server_that_does_not_even_read_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "SPARE_SECONDS", 0.1)
    async with McpSession(hostile("plain")) as session:
        assert session.pid is not None
        os.killpg(session.pid, signal.SIGSTOP)  # the server, and its launcher
        assert (await session.call("echo", {"value": "x" * 3_000_000}, seconds=0.3)).outcome == "timeout"
        os.killpg(session.pid, signal.SIGCONT)


async def test_a_server_that_dies_during_a_call_is_lost_and_its_last_words_are_shown() -> None:
    async with McpSession(hostile("exits_mid_call")) as session:
        reply = await session.call("exit", {})
        assert reply.outcome == "server_lost"
        assert "it ended with exit code 7; its last lines: the disk is on fire" in reply.text
        assert not session.alive
        assert (await session.call("echo", {})).outcome == "server_lost"


async def test_a_cancelled_call_leaves_the_session_usable() -> None:
    async with McpSession(hostile("plain")) as session:
        call = asyncio.create_task(session.call("slow", {"seconds": 0.5}))
        waiting = asyncio.create_task(session.call("echo", {}))
        await asyncio.sleep(0.1)
        call.cancel()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (await session.call("echo", {})).ok


async def test_calls_take_turns_in_the_order_of_asking_unless_they_only_read() -> None:
    async with McpSession(hostile("plain")) as session:
        replies = await asyncio.gather(*(session.call("count", {}) for _ in range(20)))
        assert [reply.text for reply in replies] == [str(number) for number in range(1, 21)]


# ---- starting ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("server", "says"),
    [
        (parse_server("no-such-command-here"), "there is no command 'no-such-command-here' on PATH"),
        (parse_server("/no/such/file"), "there is no command '/no/such/file'"),
        (McpServer(command=("cat",), cwd="/no/such/folder"), "its working directory /no/such/folder does not exist"),
        (parse_server(f"{mcp_servers.HOSTILE / 'rpc.py'}"), "rpc.py may not be executed"),
        (hostile("dies_at_start"), "ended with exit code 1 before it spoke MCP"),
        (hostile("dies_at_start"), "its last lines: Traceback (most recent call last): |"),
        (hostile("needs_variable"), "it seems to need the environment variable WEATHER_API_KEY: give it with --env WEATHER_API_KEY=…"),
        (parse_server("echo hello"), "ended with exit code 0 before it spoke MCP, and wrote to its output: hello"),
        (parse_server("cat"), "speaks no MCP that can be understood"),
        (parse_server("sleep 300", connect_seconds=0.3), "did not answer the MCP handshake within 0.3 s; is `sleep 300` an MCP server"),
        (hostile("answers_garbage", connect_seconds=0.5), "did not answer the MCP handshake within 0.5 s, and wrote to its output"),
        (McpServer(command=("cat",), env={"A": "${NOT_SET_ANYWHERE}"}), "needs the environment variable NOT_SET_ANYWHERE"),
        (parse_server("http://127.0.0.1:9/mcp"), "nothing answers at http://127.0.0.1:9/mcp"),
        (parse_server("http://127.0.0.1:9/sse"), "nothing answers at http://127.0.0.1:9/sse"),
        (parse_server("http://no-such-host.invalid/mcp"), "nothing answers at http://no-such-host.invalid/mcp"),
    ],
    ids=lambda value: value.replace("/", "-")[:40] if isinstance(value, str) else value.name,
)
async def test_a_server_that_cannot_be_used_is_one_sentence(server: McpServer, says: str) -> None:
    assert says in await refusal(server)


@pytest.mark.parametrize("transport", ["http", "sse"])
@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("401", "refused access with HTTP status 401: it wants a bearer token"),
        ("403", "refused access with HTTP status 403"),
        ("404", "answered with HTTP status 404 instead of MCP; check its path"),
        ("500", "answered with HTTP status 500 instead of MCP"),
        ("html", "speaks no MCP that can be understood"),
        ("hang", "did not answer the MCP handshake within 0.5 s"),
    ],
)
async def test_what_http_says_instead_of_mcp_is_told(path: str, says: str, transport: str, caplog: pytest.LogCaptureFixture) -> None:
    with http_faults() as url:
        text = await refusal(parse_server(f"{url}/{path}", transport=transport, connect_seconds=0.5 if path == "hang" else 20))
    assert says in text
    assert [record.name for record in caplog.records if record.levelno >= logging.WARNING] == []  # said once, by us


async def test_a_refused_token_is_told_without_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "tok-very-secret")
    with http_faults() as url:
        text = await refusal(parse_server(f"{url}/401", bearer_env="SOME_TOKEN"))
    assert "the token or header it was given is not accepted" in text
    assert "tok-very-secret" not in text


@contextmanager
def self_signed(folder: Path) -> Iterator[str]:
    """An HTTPS server with a certificate that nobody signed."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key()).serial_number(1)
    certificate = builder.not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1)).sign(key, hashes.SHA256())
    pem = folder / "both.pem"
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    pem.write_bytes(private + certificate.public_bytes(serialization.Encoding.PEM))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # the handshakes that clients break off
    server.socket = context.wrap_socket(server.socket, server_side=True)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"https://localhost:{server.server_address[1]}/mcp"
    finally:
        server.shutdown()
        server.server_close()


async def test_a_certificate_that_cannot_be_trusted_is_told(tmp_path: Path) -> None:
    with self_signed(tmp_path) as url:
        assert "cannot be trusted, because the TLS connection failed" in await refusal(parse_server(url))


@pytest.mark.parametrize(
    ("last_words", "advice"),
    [
        ("ModuleNotFoundError: No module named 'mcp.server.fastmcp'", '"mcp<2"'),
        ("ImportError: cannot import name 'McpError' from 'mcp.shared.exceptions' (/x/y.py)", '"mcp<2"'),
        ("AttributeError: 'Server' object has no attribute 'list_tools'", '"mcp<2"'),
        ("ModuleNotFoundError: No module named 'fastmcp.server.openapi'", '"fastmcp<4"'),
        ("KeyError: 'GITHUB_TOKEN'", "--env GITHUB_TOKEN=…"),
        ("Please set the OPENAI_API_KEY environment variable", "--env OPENAI_API_KEY=…"),
        ("BRAVE_API_KEY is not set", "--env BRAVE_API_KEY=…"),
        ("ERROR_LOG opened", None),
        ("python: can't open file '/tmp/x/server.py'", "name files by absolute paths, or give a cwd"),
        ("Segmentation fault", None),
    ],
)
def test_last_words_of_known_kinds_come_with_advice(last_words: str, advice: str | None) -> None:
    text = diagnose(Evidence(McpServer(command=("x",)), Redactor([]), exit_code=1, tail=last_words))
    assert last_words in text
    assert (advice in text) if advice else ("older MCP SDK" not in text and "environment variable" not in text)


async def test_a_server_that_dies_of_the_newest_protocol_is_asked_the_old_way_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "_modes", {})
    starts: list[int] = []
    monkeypatch.setattr(session_module.Place, "started", lambda self, pid: starts.append(pid))
    for expected in (2, 3):
        async with McpSession(hostile("exits_on_unknown")) as session:
            assert (await session.call("echo", {})).ok
        assert len(starts) == expected
    methods = [frame.message.get("method") for frame in session.frames if frame.direction == "out"]
    assert methods[0] == "initialize"


async def test_a_server_that_does_not_answer_the_newest_way_costs_the_wait_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(session_module, "_modes", {})
    monkeypatch.setattr("mcp.client.session.DISCOVER_TIMEOUT_SECONDS", 0.2)
    script = tmp_path / "ignores.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(mcp_servers.HOSTILE)!r})\n"
        "from rpc import Server, echo, tool\n"
        "server = Server([tool('echo')], echo)\n"
        "answer = server.answer\n"
        "server.answer = lambda message: answer(message) if message['method'] in server.methods else None\n"
        "server.serve()\n"
    )
    for expected in ("server/discover", "initialize"):
        async with McpSession(McpServer(command=(sys.executable, str(script)))) as session:
            assert (await session.call("echo", {})).ok
            assert session.frames[0].message["method"] == expected


async def test_a_modern_server_is_asked_the_newest_way() -> None:
    server = McpServer(name="time", command=tuple(mcp_servers.argv("time")))
    async with McpSession(server) as session:
        assert session.protocol == "2026-07-28"
        asked = {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"}
        reply = await session.call("convert_time", asked)
        assert reply.ok
        assert "21:00:00+09:00" in reply.text
        answers = [frame.message["result"] for frame in session.frames if "result" in frame.message]
        assert all("_meta" not in answer for answer in answers if isinstance(answer, dict))


async def test_the_fixture_is_laid_and_the_setup_calls_are_made(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("from the fixture")
    command = tuple(mcp_servers.argv("filesystem"))
    setup = (SetupCall(tool="write_file", arguments={"path": "{workdir}/b.txt", "content": "from the setup"}),)
    server = McpServer(name="files", command=command, fixture=str(tmp_path), setup=setup)
    async with McpSession(server) as session:
        for path, text in (("notes/a.txt", "from the fixture"), ("b.txt", "from the setup")):
            reply = await session.call("read_text_file", {"path": f"{{workdir}}/{path}"})
            assert (reply.outcome, reply.text) == ("ok", text)
        listed = await session.call("list_allowed_directories", {})
        assert listed.text == "Allowed directories:\n{workdir}"
    broken = server.model_copy(update={"setup": (SetupCall(tool="read_text_file", arguments={"path": "{workdir}/none"}),)})
    assert "the setup call 'read_text_file' of the server 'files' failed (tool_error)" in await refusal(broken)
    assert (tmp_path / "notes" / "a.txt").read_text() == "from the fixture"


async def test_a_secret_is_in_no_reply_no_frame_and_no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET", "open-sesame-42")
    server = McpServer(
        name="everything", command=tuple(mcp_servers.argv("everything")), env={"PASS": "${MY_SECRET}", "OTHER_KEY": "k-123-456"}
    )
    async with McpSession(server) as session:
        reply = await session.call("get-env", {})
        assert f'"PASS": "{MARK}"' in reply.text
        seen = reply.full_text + json.dumps([frame.message for frame in session.frames]) + str(server.public())
    assert "open-sesame-42" not in seen
    assert "k-123-456" not in seen


async def test_only_harmless_variables_are_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINER_SECRET", "hush")
    async with McpSession(McpServer(command=tuple(mcp_servers.argv("everything")))) as session:
        text = (await session.call("get-env", {})).full_text
    assert "TRAINER_SECRET" not in text
    assert '"PATH"' in text


# ---- URLs ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["streamableHttp", "sse"])
async def test_servers_at_urls_work_and_their_end_is_a_lost_server(mode: str) -> None:
    with mcp_servers.everything_at(mode, mcp_servers.free_port()) as (url, process):
        async with McpSession(parse_server(url)) as session:
            assert (await session.call("echo", {"message": "hi"})).text == "Echo: hi"
            assert len(await session.list_resources()) > 0
            assert len(await session.list_prompts()) > 0
            assert [tool.name for tool in session.hidden] == ["simulate-research-query"]
            process.kill()
            process.wait()
            assert (await session.call("echo", {"message": "hi"}, seconds=10)).outcome == "server_lost"
            assert not session.alive


# ---- the end -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [(), ("detached",), ("hidden",)])
async def test_children_that_outlive_their_server_are_ended_with_the_session(arguments: tuple[str, ...], tmp_path: Path) -> None:
    server = hostile("spawns_children", *arguments, env={"NOTES": str(tmp_path / "notes")})
    async with McpSession(server) as session:
        child = int((await session.call("spawn", {})).text)
        assert running(child)
    assert not running(child)


async def test_a_server_that_will_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    from apprentice.integrations.mcp import stdio

    monkeypatch.setattr(stdio, "EXIT_SECONDS", 0.2)
    async with McpSession(hostile("ignores_stdin_end")) as session:
        pid = session.pid
        assert pid is not None
    assert not running(pid)


@pytest.mark.parametrize("after", [0.0, 0.05, 0.4])
async def test_cancelling_an_opening_leaves_nothing(after: float) -> None:
    session = McpSession(hostile("never_answers"))
    opening = asyncio.create_task(session.open())
    await asyncio.sleep(after)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert session.pid is None or not running(session.pid)
    assert session.workdir is None


async def test_cancelling_an_opening_that_failed_and_is_cleaning_up_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cleaning, go_on = Event(), Event()
    remove = Place.remove

    def slowly(place: Place) -> None:
        cleaning.set()
        go_on.wait(30)
        remove(place)

    monkeypatch.setattr(Place, "remove", slowly)
    opening = asyncio.create_task(McpSession(hostile("dies_at_start")).open())
    await asyncio.to_thread(cleaning.wait, 30)
    opening.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert os.getpid() not in processes_module._grounds  # pyright: ignore[reportPrivateUsage]


async def test_a_session_is_closed_by_any_task_and_twice() -> None:
    session = McpSession(hostile("plain"))
    await asyncio.create_task(session.open())
    call = asyncio.create_task(session.call("slow", {"seconds": 30}))
    await asyncio.sleep(0.1)
    await asyncio.gather(session.aclose(), session.aclose())
    await session.aclose()
    assert (await call).outcome == "server_lost"


KILLED = """
import asyncio, sys
from apprentice.integrations.mcp.session import McpSession
from apprentice.integrations.mcp.spec import McpServer

async def main():
    async with McpSession(McpServer(command=tuple(sys.argv[2:]), env={"NOTES": sys.argv[1]})) as session:
        child = (await session.call("spawn", {})).text
        print(session.pid, child, session.workdir.parent.parent, flush=True)
        await asyncio.sleep(300)

asyncio.run(main())
"""


@pytest.mark.parametrize("how", ["detached", "hidden"])
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_trainer_leaves_no_server_no_child_and_no_folder(ending: signal.Signals, how: str, tmp_path: Path) -> None:
    argv = [sys.executable, "-c", KILLED, str(tmp_path / "notes"), *mcp_servers.hostile("spawns_children", how)]
    trainer = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert trainer.stdout is not None
    server, child, folder = trainer.stdout.readline().split()
    assert running(int(server))
    assert running(int(child))
    trainer.send_signal(ending)
    trainer.wait(30)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and (running(int(server)) or running(int(child)) or Path(folder).exists()):
        time.sleep(0.05)
    assert not running(int(server))
    assert not running(int(child))
    assert not Path(folder).exists()


async def test_the_watchdog_ends_with_the_last_lease() -> None:
    first, second = Lease(), Lease()
    ground = first.ground
    assert second.ground is ground
    await first.release()
    assert ground.watchdog.poll() is None
    await second.release()
    assert ground.watchdog.poll() == 0
    assert not ground.root.exists()
