"""The documents agree with the code: options, metrics, errors, limits, routes, links and snippets. Nothing is run but `/metrics`."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from fastapi.routing import APIRoute
from openai.types.chat import ChatCompletion as OpenAIChatCompletion
from openai.types.chat.chat_completion import Choice as OpenAIChoice
from openai.types.chat.chat_completion_message import ChatCompletionMessage as OpenAIMessage
from pydantic import BaseModel, TypeAdapter
from starlette.testclient import TestClient
from support.small_registry import CONTEXT, SmallRegistry
from support.tiny_models import tiny_tokenizer

from apprentice.core import errors
from apprentice.core.config import AdapterConfig, CheckpointPolicy, OptimizerConfig, SftConfig, TrainConfig
from apprentice.core.engines.memory import ScriptedEngine
from apprentice.core.records import BranchReason, Fate, Origin
from apprentice.core.server import app as server_app
from apprentice.core.server import auth, gateway_schema, http_errors, job_steps, jobs, policies
from apprentice.core.server.gateway_reply import ChatChoice, ChatCompletion, ReplyMessage
from apprentice.core.server.ledger import Ledger
from apprentice.core.server.limits import Limits
from apprentice.core.training.metrics import METRICS
from apprentice.core.wire import FinishTrajectory, Health, RegisterModel, RewardUpdate, TrainRequest

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.glob("*.md")])
SERVER, TRAINING, BENCHMARKS = (DOCS / f"{name}.md" for name in ("server", "training", "benchmarks"))


# ---- reading Markdown ---------------------------------------------------------------------------------------------------


def table_under(page: Path, heading: str) -> list[list[str]]:
    """The rows of the first table after `heading` (without its #), header left out; cells without backticks and escapes."""
    lines = page.read_text(encoding="utf-8").splitlines()
    at = next((n for n, line in enumerate(lines) if line.startswith("#") and line.lstrip("# ") == heading), None)
    assert at is not None, f"{page.name} has no heading '{heading}'"
    rows: list[list[str]] = []
    for line in lines[at + 1 :]:
        if line.startswith("#") or (rows and not line.startswith("|")):
            break
        if line.startswith("|"):
            rows.append([cell.strip().replace("`", "").replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    assert len(rows) > 2, f"{page.name}: there is no table under '{heading}'"
    return rows[2:]


def blocks(page: Path, *languages: str) -> Iterator[str]:
    for language, body in re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        if language in languages:
            yield body


def prose(page: Path) -> str:
    """The page without fenced code and inline code."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "", text)


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# ---- options as the tables show them ------------------------------------------------------------------------------------


def allowed(schema: dict[str, Any]) -> str:
    """A field's JSON schema in words: `integer from 1 to 512`, `number above 0`, `"a", "b"`, `… or None`."""
    if "anyOf" in schema:
        return " or ".join(allowed(option) for option in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return ", ".join(json.dumps(value) for value in schema.get("enum", [schema.get("const")]))
    match schema["type"]:
        case "null":
            return "None"
        case "boolean":
            return "True, False"
        case "array":
            return f"list of {allowed(schema['items'])}s"
        case "object":
            return f"a dict from {allowed(schema['propertyNames'])} to {allowed(schema['additionalProperties'])}s"
        case kind:
            return " ".join([kind, *_bounds(schema)])


def _bounds(schema: dict[str, Any]) -> Iterator[str]:
    words = (("minimum", "from"), ("exclusiveMinimum", "above"), ("maximum", "to"), ("exclusiveMaximum", "below"))
    return (f"{word} {schema[key]:g}" for key, word in words if key in schema)


def default(value: object) -> str:
    return json.dumps(value) if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else repr(value)


def option_rows(model: type[BaseModel]) -> list[list[str]]:
    """[name, values, default] of the options that the model itself names; what it inherits stands in another table."""
    properties = model.model_json_schema()["properties"]
    own = inspect.get_annotations(model)
    return [[name, allowed(properties[name]), default(field.default)] for name, field in model.model_fields.items() if name in own]


OPTION_TABLES: dict[str, type[BaseModel]] = {
    "OptimizerConfig": OptimizerConfig,
    "TrainConfig": TrainConfig,
    "SftConfig": SftConfig,
    "AdapterConfig": AdapterConfig,
    "CheckpointPolicy": CheckpointPolicy,
}


@pytest.mark.parametrize("heading", OPTION_TABLES)
def test_every_option_stands_in_its_table_with_its_values_and_default(heading: str) -> None:
    rows = table_under(TRAINING, heading)
    assert [row[:3] for row in rows] == option_rows(OPTION_TABLES[heading])
    assert all(row[3] for row in rows), "an option without a meaning"


def test_the_renderer_of_options_tells_bounds_apart() -> None:
    assert allowed({"type": "integer", "minimum": 1, "maximum": 512}) == "integer from 1 to 512"
    assert allowed({"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "null"}]}) == "number above 0 or None"
    assert default(1e-4) == "0.0001"
    assert default(True) == "True"


def test_every_objective_has_a_formula_and_a_source() -> None:
    rows = table_under(TRAINING, "Objectives")
    assert [row[0] for row in rows] == list(get_args(TrainConfig.model_fields["loss_type"].annotation))
    assert all(row[1] and row[2] for row in rows)


def test_every_importance_sampling_mode_is_explained() -> None:
    rows = table_under(TRAINING, "Importance sampling")
    assert [row[0] for row in rows] == list(get_args(TrainConfig.model_fields["importance_sampling"].annotation))


def test_the_table_of_metrics_is_the_one_of_the_code() -> None:
    assert dict(map(tuple, table_under(TRAINING, "Metrics"))) == METRICS


def test_every_fate_is_explained() -> None:
    assert [row[0] for row in table_under(TRAINING, "Fates")] == [fate.value for fate in Fate]


# ---- the server ---------------------------------------------------------------------------------------------------------


def error_classes(root: type[errors.ApprenticeError] = errors.ApprenticeError) -> list[type[errors.ApprenticeError]]:
    return [root, *(cls for child in root.__subclasses__() if child.__module__ == errors.__name__ for cls in error_classes(child))]


def test_the_table_of_errors_is_the_tree_of_the_code() -> None:
    expected = [[cls.code, cls.__name__, str(cls.status), cls.type] for cls in error_classes()]
    assert [row[:4] for row in table_under(SERVER, "Errors")] == expected


def number(value: float) -> str:
    return f"{value:,g}" if isinstance(value, float) else f"{value:,}"


def test_every_limit_stands_with_its_value() -> None:
    rows = {row[0]: row[1] for row in table_under(SERVER, "Limits")}
    assert rows == {name: number(value) for name, value in dataclasses.asdict(Limits()).items()}


def test_every_other_bound_stands_with_its_value() -> None:
    found = {row[0]: row[1] for row in table_under(SERVER, "Other bounds")}
    constants = {
        "MAX_CHOICES": gateway_schema.MAX_CHOICES,
        "MAX_STOP_STRINGS": gateway_schema.MAX_STOP_STRINGS,
        "MAX_HEADER_BYTES": server_app.MAX_HEADER_BYTES,
        "MINIMUM_KEY_LENGTH": auth.MINIMUM_KEY_LENGTH,
        "RETRY_AFTER_SECONDS": http_errors.RETRY_AFTER_SECONDS,
        "PINNED_VERSIONS_IN_MEMORY": policies.PINNED_VERSIONS_IN_MEMORY,
        "ENGINE_SECONDS": job_steps.ENGINE_SECONDS,
        "LEDGER_SECONDS": jobs.LEDGER_SECONDS,
        "HEARTBEAT_SECONDS": jobs.HEARTBEAT_SECONDS,
    }
    assert found == {name: number(value) for name, value in constants.items()}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    tokenizer = tiny_tokenizer()
    engine = ScriptedEngine(lambda *_: [0], tokenizer=tokenizer, context_length=CONTEXT)
    with Ledger.open(tmp_path_factory.mktemp("docs") / "ledger.sqlite") as ledger:
        yield server_app.create_app(SmallRegistry(engine, ledger, tokenizer), ledger, auth=auth.Auth.for_bind("127.0.0.1", None))


def routes_of(app: Any) -> dict[tuple[str, str], int]:
    """(method, path) → status of success, for all routes but FastAPI's own pages."""
    operations = [(path, method, route) for path, routes in app.openapi()["paths"].items() for method, route in routes.items()]
    return {
        (method.upper(), path): min(int(status) for status in route["responses"] if status.isdigit()) for path, method, route in operations
    }


def test_every_route_stands_with_its_status(app: Any) -> None:
    documented = {(row[0], row[1]): int(row[2]) for row in table_under(SERVER, "Routes of OpenAI's API")}
    in_trajectory = {(method, f"/t/{{trajectory}}{path}"): status for (method, path), status in documented.items()}
    control = {(row[0], row[1]): int(row[2]) for row in table_under(SERVER, "Routes of the control API")}
    status = {(row[0], row[1]): int(row[2]) for row in table_under(SERVER, "Status routes")}
    assert routes_of(app) == {**documented, **in_trajectory, **control, **status}


def test_no_route_is_hidden_from_the_openapi_page(app: Any) -> None:
    assert [route.path for route in app.routes if isinstance(route, APIRoute) and not route.include_in_schema] == []


def test_every_prometheus_metric_stands_in_its_table(app: Any) -> None:
    answer = TestClient(app, base_url="http://127.0.0.1").get("/metrics")
    assert answer.status_code == 200
    served = set(re.findall(r"^# TYPE (\w+) (\w+)$", answer.text, re.MULTILINE))
    assert {(row[0], row[1]) for row in table_under(SERVER, "Prometheus metrics")} == {
        (name, kind) for name, kind in served if not name.endswith("_created")
    }


def test_every_field_of_health_is_named() -> None:
    assert [row[0] for row in table_under(SERVER, "Health")] == list(Health.model_fields)


def test_every_chat_parameter_is_accepted_ignored_or_only_off() -> None:
    accepted = {row[0] for row in table_under(SERVER, "Accepted")}
    ignored = {row[0] for row in table_under(SERVER, "Ignored")}
    off = {row[0] for row in table_under(SERVER, "Accepted only when off")}
    fields = gateway_schema.ChatBody.model_fields
    assert ignored == gateway_schema.IGNORED
    assert off == {name for name, field in fields.items() if (field.description or "").startswith("Unsupported")}
    assert accepted == set(fields) - ignored - off


def test_no_parameter_that_is_called_refused_is_accepted() -> None:
    refused = {name for row in table_under(SERVER, "Refused") for name in row[0].split(", ")}
    assert len(refused) > 5
    assert refused & set(gateway_schema.ChatBody.model_fields) == set()


def test_the_extra_fields_of_replies_are_those_that_openai_does_not_have() -> None:
    extra = {
        *(name for name in ChatCompletion.model_fields if name not in OpenAIChatCompletion.model_fields),
        *(f"choices[].{name}" for name in ChatChoice.model_fields if name not in OpenAIChoice.model_fields),
        *(f"choices[].message.{name}" for name in ReplyMessage.model_fields if name not in OpenAIMessage.model_fields),
    }
    assert {row[0] for row in table_under(SERVER, "Extra fields of a reply")} == extra


def test_every_field_of_an_origin_and_every_branch_reason_is_named() -> None:
    assert [row[0] for row in table_under(SERVER, "Origin")] == list(Origin.model_fields)
    assert [row[0] for row in table_under(SERVER, "Branch reasons")] == [reason.value for reason in BranchReason]


BODIES: dict[str, Any] = {
    "/v1/chat/completions": gateway_schema.ChatBody,
    "/api/models": RegisterModel,
    "/reward": RewardUpdate,
    "/finish": FinishTrajectory,
    "/api/train-jobs": TrainRequest,
}


def test_every_body_that_curl_sends_is_valid() -> None:
    checked = 0
    for page in PAGES:
        for command in re.findall(r"curl .*?(?<!\\)\n", "".join(blocks(page, "sh")), re.DOTALL):
            body = re.search(r"-d '(.*?)'", command, re.DOTALL)
            if body is not None:
                kind = next(kind for path, kind in BODIES.items() if path in command)
                TypeAdapter(kind).validate_json(body[1])
                checked += 1
    assert checked >= len(BODIES)


def test_every_origin_that_is_shown_is_valid() -> None:
    shown = list(blocks(SERVER, "json"))
    assert len(shown) == 1
    assert Origin.model_validate_json(shown[0]).lineage


# ---- benchmarks, links, code --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", sorted((ROOT / "benchmarks").glob("[a-z]*.py")), ids=lambda path: path.name)
def test_every_benchmark_is_described_with_keys_that_it_prints(script: Path) -> None:
    source = script.read_text(encoding="utf-8")
    rows = table_under(BENCHMARKS, f"`{script.name}`")
    assert [row[0] for row in rows if f'"{row[0]}"' not in source] == []


def test_no_benchmark_is_described_that_does_not_exist() -> None:
    named = set(re.findall(r"^## `(\w+\.py)`$", BENCHMARKS.read_text(encoding="utf-8"), re.MULTILINE))
    assert named == {script.name for script in (ROOT / "benchmarks").glob("[a-z]*.py")}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    broken: list[str] = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_make_target_that_is_named_exists(page: Path) -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"(?:`|^)make (\w+)", page.read_text(encoding="utf-8"), re.MULTILINE))
    assert named <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_python_block_compiles_and_its_imports_exist(page: Path) -> None:
    missing: list[str] = []
    for block in blocks(page, "python"):
        tree = compile(block, page.name, "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        compile(tree, page.name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "apprentice":
                module = importlib.import_module(node.module or "")
                missing += [f"{node.module}.{name.name}" for name in node.names if not hasattr(module, name.name)]
    assert missing == []
