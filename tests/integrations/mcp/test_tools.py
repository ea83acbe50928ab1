"""Tools as a model sees them: names that lead back, schemas that a chat template can print, arguments judged by the raw schema."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from apprentice.integrations.mcp.inspect import oddities
from apprentice.integrations.mcp.schemas import MAX_NODES, parameters_of, schema_fault
from apprentice.integrations.mcp.tools import McpTool, ToolSet

LEGAL = re.compile(r"^[a-zA-Z0-9_-]{1,64}$")


def tool(name: str, server: str = "one", **more: Any) -> McpTool:
    return McpTool(server=server, name=name, **more)


def test_a_legal_name_of_the_only_server_stays_as_it_is() -> None:
    tools = ToolSet.build([tool("get_time"), tool("convert-time")])
    assert tools.names == ["get_time", "convert-time"]
    assert tools.resolve("get_time") == tool("get_time")
    assert tools.resolve("nope") is None


def test_several_servers_put_their_names_in_front() -> None:
    tools = ToolSet.build([tool("read", "files"), tool("read", "notes")])
    assert tools.names == ["files__read", "notes__read"]
    assert tools.function_name("notes", "read") == "notes__read"
    resolved = tools.resolve("notes__read")
    assert resolved is not None
    assert resolved.server == "notes"
    with pytest.raises(KeyError, match="notes/write"):
        tools.function_name("notes", "write")


def test_a_name_that_becomes_another_tools_name_gets_a_hash_and_the_other_keeps_its_own() -> None:
    listed = [tool("a.b"), tool("a_b"), tool("a/b")]
    names = ToolSet.build(listed).names
    assert names[1] == "a_b"
    assert re.fullmatch(r"a_b_[0-9a-f]{8}", names[0])
    assert len(set(names)) == 3
    assert ToolSet.build(listed[::-1]).names == names[::-1]


def test_a_changed_name_that_nobody_else_wants_gets_no_hash() -> None:
    assert ToolSet.build([tool("files.read"), tool("été")]).names == ["files_read", "_t_"]


def test_a_long_name_is_cut_and_hashed() -> None:
    names = ToolSet.build([tool("x" * 80), tool("x" * 81), tool("x" * 64)]).names
    assert names[2] == "x" * 64
    assert [len(name) for name in names] == [64, 64, 64]
    assert len(set(names)) == 3


def test_tools_that_differ_under_one_name_are_kept_apart_and_equal_ones_are_one() -> None:
    tools = ToolSet.build([tool("go", description="north"), tool("go", description="south"), tool("go", description="north")])
    assert len(tools.functions) == 2
    described = [resolved.description for resolved in map(tools.resolve, tools.names) if resolved]
    assert described == ["north", "south"]


@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), st.text(max_size=70) | st.sampled_from(["a.b", "a_b", "a/b", "b__c"])), max_size=12))
def test_names_are_legal_different_and_lead_back(pairs: list[tuple[str, str]]) -> None:
    listed = [tool(name, server) for server, name in dict.fromkeys(pairs)]
    tools = ToolSet.build(listed)
    assert all(LEGAL.match(name) for name in tools.names)
    assert [tools.resolve(tools.function_name(t.server, t.name)) for t in listed] == listed
    by_tool = {(t.server, t.name): name for t, name in zip(listed, tools.names, strict=True)}
    again = ToolSet.build(listed[::-1])
    assert {(t.server, t.name): again.function_name(t.server, t.name) for t in listed} == by_tool


def test_tools_that_are_not_meant_for_the_model_are_hidden() -> None:
    entries: list[Any] = [
        {"name": "seen", "inputSchema": {"type": "object"}, "_meta": {"ui": {"visibility": ["app", "model"]}}},
        {"name": "panel", "inputSchema": {"type": "object"}, "_meta": {"ui": {"visibility": ["app"]}}},
        {"name": "research", "inputSchema": {"type": "object"}, "execution": {"taskSupport": "required"}},
    ]
    tools = ToolSet.build([McpTool.from_listing("one", entry) for entry in entries])
    assert tools.names == ["seen"]
    assert [t.name for t in tools.hidden] == ["panel", "research"]


def test_a_listing_of_wrong_types_is_read_as_far_as_it_goes() -> None:
    entry: Any = {"name": "odd", "description": None, "inputSchema": [], "annotations": "x", "title": 3, "outputSchema": "?"}
    assert McpTool.from_listing("one", entry) == McpTool(server="one", name="odd")


def test_hints_are_the_servers_own_or_none() -> None:
    assert tool("a", annotations={"readOnlyHint": True, "destructiveHint": False}).read_only is True
    assert tool("a", annotations={"readOnlyHint": True, "destructiveHint": False}).destructive is False
    assert tool("a", annotations={"readOnlyHint": "yes"}).read_only is None


def test_an_absent_schema_is_an_object_without_properties() -> None:
    for schema in ({}, {"type": "object"}, {"properties": None}, None, [], {"type": "null"}):
        assert parameters_of(schema) == {"type": "object", "properties": {}}  # type: ignore[arg-type]


def test_references_are_inlined_and_what_only_tools_of_schemas_read_is_gone() -> None:
    schema: Any = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Args",
        "type": "object",
        "properties": {
            "title": {"type": "string", "title": "Title"},
            "id": {"type": "string"},
            "place": {"$ref": "#/$defs/Place", "description": "where"},
            "places": {"type": "array", "items": {"$ref": "#/$defs/Place"}},
        },
        "required": ["title"],
        "$defs": {
            "Place": {"title": "Place", "type": "object", "properties": {"zone": {"$ref": "#/$defs/Zone~1Name"}}},
            "Zone/Name": {"enum": ["UTC"]},
        },
    }
    place = {"type": "object", "properties": {"zone": {"enum": ["UTC"]}}}
    assert parameters_of(schema) == {
        "type": "object",
        "properties": {
            "title": {"type": "string"},
            "id": {"type": "string"},
            "place": {**place, "description": "where"},
            "places": {"type": "array", "items": place},
        },
        "required": ["title"],
    }


def test_a_recursive_schema_ends_where_it_repeats() -> None:
    schema: Any = {
        "properties": {"root": {"$ref": "#/$defs/Node"}},
        "$defs": {"Node": {"type": "object", "description": "a node", "properties": {"next": {"$ref": "#/$defs/Node"}}}},
    }
    node = {"type": "object", "description": "a node", "properties": {"next": {"type": "object", "description": "a node"}}}
    assert parameters_of(schema)["properties"] == {"root": node}
    assert parameters_of({"$ref": "#"}) == {"type": "object", "properties": {}}
    assert parameters_of({"properties": {"x": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/a"}}})["properties"] == {"x": {}}


def test_references_that_multiply_are_cut() -> None:
    """Each definition refers twice to the next: written out, 2**40 schemas."""
    definitions: Any = {f"d{n}": {"type": "object", "properties": {k: {"$ref": f"#/$defs/d{n + 1}"} for k in "ab"}} for n in range(40)}
    cleaned = parameters_of({"properties": {"x": {"$ref": "#/$defs/d0"}}, "$defs": definitions})
    assert len(json.dumps(cleaned)) < MAX_NODES * 100


def test_a_reference_out_of_the_schema_means_anything() -> None:
    schema: Any = {"properties": {"a": {"$ref": "http://127.0.0.1:1/x", "description": "kept"}, "b": {"$ref": "#/nowhere"}}}
    assert parameters_of(schema)["properties"] == {"a": {"description": "kept"}, "b": {}}


def test_defaults_of_the_wrong_type_are_dropped_and_possible_ones_kept() -> None:
    kept: Any = {
        "a": {"type": ["integer", "null"], "default": None},
        "b": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        "c": {"default": None},
        "d": {"enum": ["x", None], "default": None},
        "e": {"type": "number", "default": 3},
    }
    wrong: Any = {
        "f": {"type": "boolean", "default": None},
        "g": {"anyOf": [{"type": "string"}, {"type": "integer"}], "default": None},
        "h": {"enum": ["x"], "default": None},
        "i": {"type": "integer", "default": "many"},
        "j": {"type": "integer", "default": True},
    }
    properties: Any = parameters_of({"properties": {**kept, **wrong}})["properties"]
    assert {name: properties[name] for name in kept} == kept
    assert [name for name in wrong if "default" in properties[name]] == []


keywords = st.sampled_from(
    [
        "type",
        "properties",
        "$ref",
        "$defs",
        "items",
        "anyOf",
        "required",
        "default",
        "enum",
        "title",
        "additionalProperties",
        "pattern",
        "x",
    ]
)


def words(values: Any) -> Any:
    return st.dictionaries(keywords, values | st.sampled_from(["object", "#", "#/$defs/x", "#/properties/x", "["]), max_size=4)


json_values = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), lambda v: st.lists(v, max_size=3) | words(v))


@settings(deadline=None)  # a schema that refers to itself for ever is found out only at Python's limit
@given(words(json_values))
def test_no_schema_breaks_the_conversion_or_the_judgement(schema: Any) -> None:
    parameters = parameters_of(schema)
    assert parameters["type"] == "object"
    assert isinstance(parameters["properties"], dict)
    assert "$ref" not in json.dumps(parameters_of({"properties": {"y": {"$ref": "#/$defs/z"}}, "$defs": {"z": {"type": "string"}}}))
    one = tool("t", input_schema=schema)
    tools = ToolSet.build([one])
    assert isinstance(tools.violations(one, {"x": 1}), list)
    assert isinstance(schema_fault(schema), str | None)


SCHEMA: Any = {
    "type": "object",
    "properties": {"zone": {"type": "string"}, "count": {"type": "integer", "minimum": 1}, "ids": {"items": {"$ref": "#/$defs/Id"}}},
    "required": ["zone"],
    "$defs": {"Id": {"type": "integer"}},
}


def test_violations_are_sentences_by_the_raw_schema() -> None:
    one = tool("t", input_schema=SCHEMA)
    tools = ToolSet.build([one])
    assert tools.violations(one, {"zone": "UTC", "count": 2, "ids": [1]}) == []
    assert tools.violations(one, {}) == ["a required argument is missing: 'zone' is a required property"]
    assert tools.violations(one, {"zone": 3, "count": 0, "ids": [1, "x"]}) == [
        "argument 'count': 0 is less than the minimum of 1",
        "argument 'ids[1]': 'x' is not of type 'integer'",
        "argument 'zone': 3 is not of type 'string'",
    ]
    assert tools.violations(one, "zone=UTC") == ["the arguments must be an object, got string"]
    assert schema_fault(SCHEMA) is None


@pytest.mark.parametrize(
    ("schema", "fault"),
    [
        ({"properties": {"x": {"type": "str"}}}, "is not valid"),
        ({"properties": {"x": {"$ref": "http://127.0.0.1:1/schema"}}}, None),
        ({"$ref": "http://127.0.0.1:1/schema"}, "refers to something outside itself"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "RecursionError"),
        ({"required": "x"}, "is not valid"),
    ],
)
def test_a_schema_that_is_wrong_judges_nothing_and_is_named(schema: Any, fault: str | None) -> None:
    one = tool("t", input_schema=schema)
    assert ToolSet.build([one]).violations(one, {"x": 1}) == []
    told = [oddity for oddity in oddities(one) if oddity.endswith("so arguments are not checked before a call")]
    assert (len(told), fault is None or fault in told[0]) == (0 if fault is None else 1, True)


SLOW = "^(a+)+$"
LONG = "a" * 5_000 + "!"
DRAFT = "https://json-schema.org/draft/2020-12/schema"


@pytest.mark.parametrize(
    ("schema", "arguments", "found"),
    [
        ({"properties": {"x": {"pattern": SLOW}}}, {"x": LONG}, 1),
        ({"properties": {"x": {"pattern": SLOW}}}, {"x": "aaa"}, 0),
        ({"properties": {"x": {"pattern": "a*a*a*a*a*a*b"}}}, {"x": LONG}, 1),
        ({"properties": {"x": {"$schema": DRAFT, "pattern": SLOW}}}, {"x": LONG}, 1),
        ({"$schema": DRAFT, "properties": {"x": {"$ref": "#"}}, "pattern": SLOW}, {"x": LONG}, 2),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "properties": {"x": {"pattern": SLOW}}}, {"x": LONG}, 1),
        ({"patternProperties": {SLOW: {"type": "integer"}}, "additionalProperties": False}, {LONG: 1}, 1),
        ({"patternProperties": {SLOW: {"type": "integer"}}, "additionalProperties": False}, {"aa": 1}, 0),
        ({"patternProperties": {SLOW: {"type": "integer"}}}, {"aa": "1"}, 1),
        ({"propertyNames": {"pattern": SLOW}}, {LONG: 1}, 1),
        ({"patternProperties": {SLOW: {}}, "unevaluatedProperties": False}, {LONG: 1}, 0),
        ({"properties": {"x": {"pattern": "(?=a)(a+)+$"}}, "required": ["y"]}, {"x": LONG}, 0),
    ],
    ids=str,
)
@pytest.mark.timeout(60)  # an engine that backtracks would not come to an end
def test_no_pattern_of_a_server_takes_for_ever(schema: Any, arguments: Any, found: int) -> None:
    """What cannot be judged by an engine that does not backtrack is not judged: the server will."""
    one = tool("t", input_schema=schema)
    assert len(ToolSet.build([one]).violations(one, arguments)) == found


@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from(["ab", "b", "ca"]), st.integers(0, 2), max_size=3),
    st.dictionaries(st.sampled_from(["a", "^b", "c$"]), st.sampled_from([{"minimum": 1}, {"type": "string"}, True]), max_size=2),
    st.sampled_from([None, True, False, {"maximum": 1}]),
)
def test_arguments_are_judged_as_jsonschema_judges_them(arguments: Any, patterns: Any, additional: Any) -> None:
    schema: Any = {
        "type": "object",
        "properties": {"b": {"maximum": 1}},
        "patternProperties": patterns,
        "propertyNames": {"pattern": "a|b"},
    }
    if additional is not None:
        schema["additionalProperties"] = additional
    one = tool("t", input_schema=schema)
    found = [re.sub(r"^argument '\w+': ", "", sentence) for sentence in ToolSet.build([one]).violations(one, arguments)]
    expected = list(Draft202012Validator(schema).iter_errors(arguments))
    assert len(found) == len(expected)
    assert {error.message for error in expected if error.validator != "additionalProperties"} <= set(found)  # it has other words


def test_the_token_count_and_the_digest_follow_what_the_model_is_told() -> None:
    first, second = tool("a", description="x" * 100), tool("b")
    tools = ToolSet.build([first, second])
    assert 25 < tools.tokens < 60
    assert ToolSet.build([second, first]).digest == tools.digest
    assert ToolSet.build([first]).digest != tools.digest
    assert ToolSet.build([tool("a", description="y" * 100), second]).digest != tools.digest
    assert ToolSet.build([]).tokens == 0
