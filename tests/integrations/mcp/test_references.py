"""What the result of an earlier call tells: the id of a new thing, the first and the last of a list."""

from __future__ import annotations

import pytest
from pydantic import JsonValue

from apprentice.core.records import JsonObject
from apprentice.integrations.mcp.kinds import Leaf
from apprentice.integrations.mcp.references import Reference, value_in

ID = Leaf(("id",), "id", {"type": "string"}, True)
NUMBER = Leaf(("task_id",), "integer", {"type": "integer"}, True)
NAME = Leaf(("names", "[]"), "name", {"type": "string"}, True)
PATH = Leaf(("path",), "path", {"type": "string"}, True)


@pytest.mark.parametrize(
    ("leaf", "arguments", "text", "value"),
    [
        (NUMBER, {"title": "buy 3 eggs"}, "Added task 7: buy 3 eggs", 7),
        (NUMBER, {}, '{"id": 4, "title": "x"}', 4),
        (NUMBER, {}, '{"task_id": 5, "user_id": 9}', 5),
        (NUMBER, {}, "12", 12),
        (NUMBER, {}, "Added 2 of 3 tasks", None),
        (NUMBER, {}, "Added.", None),
        (ID, {}, "Made a note with id: n-42f", "n-42f"),
        (ID, {}, '{"note": {"id": "abc", "title": "t"}}', "abc"),
        (ID, {}, "Created 0f8fad5b-d9cb-469f-a165-70867728950e", "0f8fad5b-d9cb-469f-a165-70867728950e"),
    ],
)
def test_the_id_of_what_was_made_is_read_off_the_result(leaf: Leaf, arguments: JsonObject, text: str, value: JsonValue) -> None:
    assert value_in(Reference(0, leaf, "new"), arguments, text) == value


@pytest.mark.parametrize(
    ("leaf", "arguments", "text", "first", "last"),
    [
        (NUMBER, {}, "1. [ ] eggs\n2. [x] milk", 1, 2),
        (NUMBER, {}, '[{"id": 3, "title": "a"}, {"id": 8, "title": "b"}]', 3, 8),
        (NAME, {}, '{"entities": [{"name": "A"}, {"name": "B"}], "relations": [{"name": "r"}]}', "A", "B"),
        (NAME, {}, '["x", "y"]', "x", "y"),
        (PATH, {"path": "docs"}, "[DIR] old\n[FILE] a.txt\n[FILE] b.txt", "docs/a.txt", "docs/b.txt"),
        (PATH, {"path": "."}, "nothing here", None, None),
    ],
)
def test_the_first_and_the_last_of_a_list(leaf: Leaf, arguments: JsonObject, text: str, first: JsonValue, last: JsonValue) -> None:
    assert value_in(Reference(0, leaf, "first"), arguments, text) == first
    assert value_in(Reference(0, leaf, "last"), arguments, text) == last
