"""Small SQL statements over a table with a text and a number column, each with the sentences that ask for it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from .frames import Frame
from .stock import Table, named, number

Row = tuple[str, int]


@dataclass(slots=True)
class Rows:
    """A table and what is known to be in it. `whole`: whether these are all of its rows."""

    table: Table
    rows: list[Row] = field(default_factory=list[Row])


@dataclass(frozen=True, slots=True)
class Statement:
    sql: str
    frame: Frame
    slots: dict[str, str]


_CREATE = Frame(
    "sql create",
    ("table", "text", "number"),
    (
        "Make a table {table} with a text column {text} and an integer column {number}.",
        "I need a new table called {table}. It has the columns {text} (text) and {number} (integer).",
        "Set up the table {table} with {text} as text and {number} as an integer.",
        "Please add a table named {table} whose columns are {text} (text) and {number} (integer).",
        "There should be a table {table} that holds {text} (text) and {number} (integer).",
        "Start a new table {table}: {text} is text, {number} is an integer.",
    ),
    (
        "make a table {table} with a text column {text} and an integer column {number}",
        "set up a table called {table} with {text} as text and {number} as an integer",
        "add a new table {table} that holds {text} (text) and {number} (integer)",
        "start a table {table} with {text} (text) and {number} (integer)",
        "make me a table called {table}: {text} is text, {number} is an integer",
        "set up {table}, a table with the columns {text} (text) and {number} (integer)",
    ),
)
_INSERT = Frame(
    "sql insert",
    ("table", "text", "number", "cell", "value"),
    (
        'Add a row to {table} with {text} "{cell}" and {number} {value}.',
        'Put "{cell}" into {table} as {text}, with {value} as {number}.',
        'The table {table} needs a row more: {text} is "{cell}", {number} is {value}.',
        'Please enter in {table}: {text} "{cell}", {number} {value}.',
        'One more row for {table}: {text} is "{cell}" and {number} is {value}.',
        'Into {table}, put a row with {text} "{cell}" and {number} {value}.',
    ),
    (
        'add a row with {text} "{cell}" and {number} {value} to {table}',
        'put "{cell}" into {table} as {text}, with {value} as {number}',
        'enter {text} "{cell}" and {number} {value} in {table}',
        'put a row into {table} with {text} "{cell}" and {number} {value}',
        'add "{cell}" to {table} as {text}, with {number} {value}',
        'give {table} one more row with {text} "{cell}" and {number} {value}',
    ),
)
_UPDATE = Frame(
    "sql update",
    ("table", "text", "number", "cell", "value"),
    (
        'In {table}, set {number} to {value} where {text} is "{cell}".',
        'Change the {number} of the row of {table} with {text} "{cell}" to {value}.',
        'The {number} where {text} is "{cell}" in {table} should be {value}.',
        'Make the {number} {value} in {table} for the {text} "{cell}".',
        'In {table}, the row with {text} "{cell}" gets the {number} {value}.',
        'For the {text} "{cell}" in {table}, change {number} to {value}.',
    ),
    (
        'set {number} to {value} in {table} where {text} is "{cell}"',
        'change the {number} where {text} is "{cell}" in {table} to {value}',
        'make {value} the {number} of the row in {table} whose {text} is "{cell}"',
        'in {table}, change {number} to {value} for the {text} "{cell}"',
        'let the {number} of "{cell}" ({text}) in {table} be {value}',
        'put {value} as {number} where {text} is "{cell}" in {table}',
    ),
)
_COUNT = Frame(
    "sql count",
    ("table",),
    (
        "How many rows does {table} have?",
        "How many rows are there in {table}?",
        "Tell me how many rows {table} has.",
        "I need the number of rows in {table}.",
        "What is the number of rows in the table {table}?",
        "Count what is in {table}.",
    ),
    (
        "tell me how many rows {table} has",
        "count the rows of {table}",
        "say how many rows are in {table}",
        "find out how many rows {table} has",
        "tell me the number of rows in {table}",
        "see how many rows {table} has",
    ),
)
_VALUE = Frame(
    "sql value",
    ("table", "text", "number", "cell"),
    (
        'What is the {number} in {table} where {text} is "{cell}"?',
        'Which {number} does {table} have for the {text} "{cell}"?',
        'Look up in {table} the {number} of the row whose {text} is "{cell}".',
        'Tell me the {number} where {text} is "{cell}" in {table}.',
        'In {table}, find the {number} that goes with {text} "{cell}".',
        'I need the {number} of "{cell}" ({text}) from {table}.',
    ),
    (
        'tell me the {number} where {text} is "{cell}" in {table}',
        'look up the {number} in {table} for the {text} "{cell}"',
        'find the {number} that goes with {text} "{cell}" in {table}',
        'find the {number} of the row in {table} whose {text} is "{cell}"',
        'say which {number} {table} has for the {text} "{cell}"',
        'get me the {number} in {table} where {text} is "{cell}"',
    ),
)
_ALL = Frame(
    "sql all",
    ("table",),
    (
        "Show me everything in {table}.",
        "What is in the table {table}?",
        "Let me see all rows of {table}.",
        "Which rows does {table} hold?",
        "I'd like to see all of {table}.",
        "Give me the whole table {table}.",
    ),
    (
        "show me everything in {table}",
        "let me see all rows of {table}",
        "tell me what is in {table}",
        "show me all rows of {table}",
        "tell me which rows {table} has",
        "let me see the whole table {table}",
    ),
)


def creation(table: Table) -> Statement:
    sql = f"CREATE TABLE {table.name} ({table.text} TEXT, {table.number} INTEGER)"
    return Statement(sql, _CREATE, {"table": table.name, "text": table.text, "number": table.number})


def insertion(rows: Rows, cell: str, value: int) -> Statement:
    table = rows.table
    sql = f"INSERT INTO {table.name} ({table.text}, {table.number}) VALUES ('{_escaped(cell)}', {value})"
    return Statement(sql, _INSERT, _slots(table, cell, value))


def update(rows: Rows, value: int, chance: random.Random) -> Statement:
    table, (cell, _) = rows.table, chance.choice(rows.rows)
    sql = f"UPDATE {table.name} SET {table.number} = {value} WHERE {table.text} = '{_escaped(cell)}'"
    return Statement(sql, _UPDATE, _slots(table, cell, value))


def question(rows: Rows, chance: random.Random) -> Statement:
    """A SELECT whose answer is short."""
    table = rows.table
    names = {"table": table.name}
    if rows.rows and chance.random() < 0.6:
        cell, _ = chance.choice(rows.rows)
        sql = f"SELECT {table.number} FROM {table.name} WHERE {table.text} = '{_escaped(cell)}'"
        return Statement(sql, _VALUE, {**names, "text": table.text, "number": table.number, "cell": cell})
    if rows.rows and chance.random() < 0.5 and len(rows.rows) < 4:
        return Statement(f"SELECT * FROM {table.name}", _ALL, names)
    return Statement(f"SELECT COUNT(*) FROM {table.name}", _COUNT, names)


def new_row(chance: random.Random) -> Row:
    return named(chance), number(chance)


def _slots(table: Table, cell: str, value: int) -> dict[str, str]:
    return {"table": table.name, "text": table.text, "number": table.number, "cell": cell, "value": str(value)}


def _escaped(text: str) -> str:
    return text.replace("'", "''")
