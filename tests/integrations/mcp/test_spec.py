"""Server specs: what a text means, what a file says, what is wrong with it, and what is never shown."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apprentice.core.errors import ConfigError
from apprentice.integrations.mcp.config_file import lines_of
from apprentice.integrations.mcp.redaction import MARK, Redactor, guarded_logs
from apprentice.integrations.mcp.spec import McpServer, SetupCall, parse_server

CLAUDE = """{
  "mcpServers": {
    "files": {
      "command": "npx",
      "args": ["-y", "@modelcontextprotocol/server-filesystem", "{workdir}"],
      "env": {"LEVEL": "debug"},
      "disabled": false
    },
    "my search": {
      "type": "http",
      "url": "https://search.example.com/mcp",
      "headers": {"X-Api-Key": "${SEARCH_KEY}"}
    },
    "old": {"type": "sse", "url": "http://localhost:9/stream"}
  }
}
"""


@pytest.fixture
def claude(tmp_path: Path) -> Path:
    path = tmp_path / "claude.json"
    path.write_text(CLAUDE)
    return path


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("npx -y @modelcontextprotocol/server-filesystem@1.2 {workdir}", "filesystem"),
        ("uvx mcp-server-time --local-timezone UTC", "time"),
        ("python3.11 -m mcp_server_git --repository .", "git"),
        ("/opt/bin/mcp-server-sqlite --db-path {workdir}/x.db", "sqlite"),
        ("node /x/node_modules/@modelcontextprotocol/server-memory/dist/index.js", "memory"),
        ("python server.py", "server"),
        ("env A=b ./weather.sh", "weather"),
        ("https://mcp.example.com/mcp", "example-com"),
        ("mcp-server", "server"),
        ("./" + "x" * 80, "x" * 32),
    ],
)
def test_a_server_without_a_name_is_called_after_what_it_runs(text: str, name: str) -> None:
    assert parse_server(text).name == name


def test_commands_get_a_process_per_rollout_and_urls_a_session() -> None:
    assert (parse_server("cmd 'a b' c").command, parse_server("cmd").isolation) == (("cmd", "a b", "c"), "process")
    http, sse = parse_server("http://localhost:1/mcp"), parse_server("http://localhost:1/sse")
    assert [(server.transport, server.isolation) for server in (http, sse)] == [("http", "session"), ("sse", "session")]
    assert parse_server("http://localhost:1/mcp", transport="sse").transport == "sse"
    assert parse_server("cmd", isolation="shared", name="x").isolation == "shared"


def test_an_mcp_servers_file_as_hosts_have_it_is_understood(claude: Path) -> None:
    servers = {name: parse_server(f"{claude}:{name}") for name in ("files", "my search", "old")}
    assert {name: (server.name, server.transport) for name, server in servers.items()} == {
        "files": ("files", "stdio"),
        "my search": ("my-search", "http"),
        "old": ("old", "sse"),
    }
    assert servers["files"].command == ("npx", "-y", "@modelcontextprotocol/server-filesystem", "{workdir}")
    for text in (f"{claude}:files", f"{claude}#files"):
        assert parse_server(text, env={"MORE": "1"}).env == {"LEVEL": "debug", "MORE": "1"}
    assert servers["my search"].url == "https://search.example.com/mcp"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ('{\n "mcpServers": {\n  "a": {"command": "x",}\n }\n}', "line 3: this is no JSON"),
        ("[1]", "must be a JSON object with the key 'mcpServers'"),
        ('{"servers": {}}', "its keys are: 'servers'"),
        ('{"mcpServers": {}}', "mcpServers holds no server"),
        ('{"mcpServers": []}', "mcpServers must be an object"),
        ('{"mcpServers": {\n"a": {"args": []}}}', "line 2: mcpServers.a needs either 'command' or 'url', and has neither"),
        ('{"mcpServers": {\n"a": {"command": "x", "url": "http://x"}}}', "line 2: mcpServers.a needs either"),
        ('{"mcpServers": {"a": {\n"command": "x",\n"arg": ["y"]}}}', "line 3: mcpServers.a.arg is no known key; did you mean 'args'?"),
        ('{"mcpServers": {"a": {"command": "x",\n"args": "y"}}}', "line 2: mcpServers.a.args must be a list of texts, got str"),
        ('{"mcpServers": {"a": {"command": "x",\n"env": {\n"KEY": 5}}}}', "line 3: mcpServers.a.env.KEY must be a text in quotes, got int"),
        ('{"mcpServers": {"a": {"command": "x", "type": "pigeon"}}}', "mcpServers.a.type must be one of"),
        (
            '{"mcpServers": {"a": {"command": "x",\n "type": "http"}}}',
            "line 2: mcpServers.a.type is 'http', which does not go with a command",
        ),
        ('{"mcpServers": {"a": {"command": "x"},\n"a": {"command": "y"}}}', "lines 1 and 2: the server 'a' is there twice"),
        (
            '{"mcpServers": {"a": {"command": "x",\n"connect_seconds": -1}}}',
            "servers.json, line 2: mcpServers.a.connect_seconds: the field 'connect_seconds' is wrong",
        ),
        ('{"mcpServers": {"a": {"command": "x",\n"allow": "x*"}}}', "line 2: mcpServers.a.allow must be a list of texts, got str"),
        ('{"mcpServers": {"a": {"command": "x",\n"isolation": "none"}}}', "line 2: mcpServers.a.isolation: the field 'isolation' is wrong"),
        ('{"mcpServers": {"a": {"command": "x",\n"setup": [{}]}}}', "line 2: mcpServers.a.setup: the field 'setup.0.tool' is wrong"),
        ('{"mcpServers": {"a": {"command": "x",\n"fixture": "/no/such"}}}', "line 2: mcpServers.a.fixture: the fixture of server 'a'"),
        ('{"mcpServers": {"a": {\n"url": "ftp://x/y"}}}', "line 2: mcpServers.a.url: server 'a' needs an http or https URL with a host"),
        ('{"mcpServers": {"a": {"command": "x",\n"headers": {"K": "v"}}}}', "line 2: mcpServers.a.headers: server 'a' is a command"),
        ('{"mcpServers": {"a": {"command": "x",\n"bearer_env": "V"}}}', "line 2: mcpServers.a.bearer_env: server 'a' is a command"),
        (
            '{"mcpServers": {"a": {"command": "x",\n"disabled": true}}}',
            "line 2: mcpServers.a.disabled is true, so this server is switched off",
        ),
    ],
)
def test_a_malformed_file_is_one_sentence_with_key_and_line(tmp_path: Path, body: str, says: str) -> None:
    path = tmp_path / "servers.json"
    path.write_text(body)
    with pytest.raises(ConfigError) as caught:
        parse_server(f"{path}:a")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_odd_in_other_entries_does_not_matter(tmp_path: Path) -> None:
    odd = {"command": "x", "envFile": ".env", "oauth": {}, "disabled": True}
    path = tmp_path / "servers.json"
    path.write_text(json.dumps({"mcpServers": {"time": {"command": "uvx"}, "东京": odd, "大阪": {"serverUrl": 5}, "none": None}}))
    assert parse_server(f"{path}:time").command == ("uvx",)
    with pytest.raises(ConfigError, match=r"mcpServers\.东京.envFile is no known key"):
        parse_server(f"{path}:东京")


def test_an_option_of_the_command_line_is_not_blamed_on_the_file(claude: Path) -> None:
    with pytest.raises(ConfigError, match=r"^the fixture of server 'files'"):
        parse_server(f"{claude}:files", fixture="/no/such")


def test_a_url_is_known_by_any_scheme_and_an_address_without_one_is_told(tmp_path: Path) -> None:
    assert parse_server("HTTP://localhost:3000/mcp").transport == "http"
    with pytest.raises(ConfigError, match="needs an http or https URL"):
        parse_server("ws://localhost:3000/mcp")
    for text in ("localhost:3000/mcp", "127.0.0.1:3000", "[::1]:3000/sse"):
        with pytest.raises(ConfigError, match=re.escape(f"write http://{text}")):
            parse_server(text)


def test_an_unknown_or_missing_name_says_which_there_are(claude: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no server 'fils', only 'files', 'my search', 'old'; did you mean 'files'"):
        parse_server(f"{claude}:fils")
    with pytest.raises(ConfigError, match="holds 3 servers"):
        parse_server(str(claude))
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        parse_server(f"{tmp_path}/none.json:a")
    (tmp_path / "latin.json").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="it is not UTF-8"):
        parse_server(f"{tmp_path}/latin.json")


@pytest.mark.parametrize(
    ("text", "options", "says"),
    [
        ("", {}, "got an empty text"),
        ("cmd 'open", {}, "quotes closed"),
        ("cmd", {"isolation": "none"}, "the field 'isolation' is wrong: Input should be 'process', 'session' or 'shared', got 'none'$"),
        ("cmd", {"call_seconds": "long"}, "the field 'call_seconds' is wrong: .*, got 'long'$"),
        ("cmd", {"unknown": "s3cret"}, "the field 'unknown' is wrong: Extra inputs are not permitted$"),
        ("cmd", {"env": {"K": ["s3cret"]}}, "the field 'env.K' is wrong: Input should be a valid string$"),
        ("cmd", {"bearer_env": "X"}, "headers and bearer tokens are for URLs"),
        ("cmd", {"fixture": "/no/such/folder"}, "there is none at /no/such/folder"),
        ("cmd", {"transport": "http"}, "cannot use the transport 'http' with a command"),
        ("http://x/mcp", {"isolation": "process"}, "runs elsewhere"),
        ("http://x/mcp", {"env": {"A": "b"}}, "env is for commands"),
        ("http:///mcp", {}, "with a host"),
        ("http://x:99999/mcp", {}, "must be a number from 1 to 65535"),
    ],
)
def test_a_spec_that_cannot_be_is_one_sentence(text: str, options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_server(text, **options)


def test_variables_and_the_folder_are_filled_in_when_a_session_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    server = McpServer(command=("run", "{workdir}/db", "${LEVEL:-low}"), env={"KEY": "${MY_KEY}", "DIR": "{workdir}"})
    with pytest.raises(ConfigError, match="env KEY of server 'db' needs the environment variable MY_KEY, which is not set"):
        server.model_copy(update={"name": "db"}).resolve(Path("/w"))
    monkeypatch.setenv("MY_KEY", "sesame")
    resolved = server.resolve(Path("/w"))
    assert (resolved.command, resolved.env) == (("run", "/w/db", "low"), {"KEY": "sesame", "DIR": "/w"})
    assert "sesame" not in repr(resolved)
    bearer = parse_server("http://x/mcp", bearer_env="NO_TOKEN")
    with pytest.raises(ConfigError, match="environment variable NO_TOKEN, which is not set"):
        bearer.bearer()


def test_files_named_relative_to_our_folder_are_found_from_the_servers_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "test").mkdir()
    (tmp_path / "server.py").touch()
    monkeypatch.chdir(tmp_path)
    server = parse_server("python server.py --mode test --root ./data --db=data/x.db --out=./data . {workdir}/y other.py -v1.2")
    assert server.resolve(Path("/w")).command == (
        *("python", f"{tmp_path}/server.py", "--mode", "test", "--root", f"{tmp_path}/data", "--db=data/x.db"),
        *(f"--out={tmp_path}/data", str(tmp_path), "/w/y", "other.py", "-v1.2"),
    )
    assert parse_server("python server.py", cwd="/x").resolve(None).command == ("python", "server.py")


def test_no_secret_is_in_what_may_be_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VAULT", "from-the-environment")
    monkeypatch.setenv("TOKEN_VAR", "the-bearer-token")
    command = McpServer(
        command=("serve", "--api-key", "in-the-arguments", "--token=joined-one", "${VAULT}", "{workdir}"),
        env={"DB_PASSWORD": "pass/word+1", "DATA": "{workdir}/data", "LEVEL": "debug", "LICENCE": "ABC-DEF-123"},
        setup=(SetupCall(tool="login", arguments={"secret": "from-the-environment"}),),
    )
    url = McpServer(
        url="https://me:url-password@example.com/mcp?key=query-secret&v=1",
        headers={"Authorization": "Basic header-secret"},
        bearer_env="TOKEN_VAR",
    )
    hidden = ["in-the-arguments", "joined-one", "from-the-environment", "pass/word+1", "ABC-DEF-123"]
    for server, values in ((command, hidden), (url, ["url-password", "query-secret", "header-secret", "the-bearer-token"])):
        shown = json.dumps(server.public(), ensure_ascii=False)
        for value in values:
            assert value not in shown
            assert value not in server.redact(f"it said {value} and {json.dumps(value)}")
    assert command.redact("pass%2Fword%2B1") == MARK  # as it stands in a URL
    assert command.redact("debug in {workdir}/data") == "debug in {workdir}/data"
    common = McpServer(command=("x", "${HOME}"), env={"GREETING": "hello", "NAME": "${USER:-nobody}", "MODE": "memory"})
    assert common.redact(f"hello memory {Path.home()}") == f"hello memory {Path.home()}"
    assert McpServer(url="http://x/y", headers={"Accept": "application/json"}).redact("application/json") == "application/json"
    assert command.public()["env"] == ["DATA", "DB_PASSWORD", "LEVEL", "LICENCE"]
    assert url.public()["url"] == f"https://example.com/mcp?key={MARK}&v={MARK}"


def test_a_redactor_leaves_nothing_and_changes_nothing_else() -> None:
    hide = Redactor(["longer-secret", "secret", "abc"])
    assert hide.text("a longer-secret, a secret, abc") == f"a {MARK}, a {MARK}, abc"
    assert hide.value({"secret": ["x secret", 5, None]}) == {MARK: [f"x {MARK}", 5, None]}
    same: list[str] = ["x"]
    assert Redactor([]).value(same) is same  # type: ignore[arg-type]


def test_the_sdks_loggers_write_no_secret_while_a_session_is_open(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("httpx2")
    with caplog.at_level(logging.INFO), guarded_logs(Redactor(["s3cret-value"])):
        logger.info("GET %s", "http://x/?key=s3cret-value")
        try:
            raise ValueError("s3cret-value")
        except ValueError:
            logger.exception("it failed")
    assert "s3cret-value" not in caplog.text
    assert f"GET http://x/?key={MARK}" in caplog.text
    assert logger.filters == []


def test_allow_and_deny_are_patterns_on_the_servers_own_names() -> None:
    server = McpServer(command=("x",), allow=("read_*", "list"), deny=("*_secret",))
    assert [server.admits(name) for name in ("read_a", "list", "write_a", "read_secret")] == [True, True, False, False]
    assert McpServer(command=("x",)).admits("anything")


NAMES = st.text(min_size=1, max_size=5)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
)


@given(st.dictionaries(NAMES, JSON, min_size=1, max_size=4))
def test_every_key_of_a_file_is_found_on_its_line(body: dict[str, object]) -> None:
    text = json.dumps(body, indent=1)
    lines = text.splitlines()
    found = lines_of(text)
    for key in body:
        assert any(lines[number - 1].startswith(f" {json.dumps(key)}:") for number in found[(key,)])
