"""What a rollout left in its private folder, in a form that can be compared with another rollout's: files, and rows of databases."""

from __future__ import annotations

import hashlib
import os
import sqlite3
import stat
from contextlib import closing
from pathlib import Path

from pydantic import JsonValue

from ...core.records import JsonObject
from .spec import WORKDIR
from .values import plain_sql

LARGEST_TEXT = 64 * 1024
"""Bytes; a larger file is its hash."""
MOST_FILES = 2_000
MOST_ROWS = 10_000
"""Of one table; a larger table is its size and hash."""
HIDDEN = 1
"""So SQLite marks the columns of virtual tables that `select *` does not show."""
_SQLITE = b"SQLite format 3\0"
_PASSING = ("-wal", "-shm", "-journal", ".pyc", ".lock")
"""Files that come and go by themselves."""


def folder_state(folder: Path) -> JsonObject:
    """Each file by its path in `folder`: its text, `sha256:…` if it is large or no text, the tables of a SQLite database."""
    found: JsonObject = {}
    for path in _files(folder):
        if len(found) == MOST_FILES:
            found["…"] = f"more than {MOST_FILES} files"
            break
        name = path.relative_to(folder).as_posix()
        try:
            found[name] = _file_state(path, folder)
        except OSError as error:
            found[name] = f"unreadable: {error.strerror}"
    return found


def _files(folder: Path) -> list[Path]:
    """Files and links under `folder`, and folders that are empty, by name; links are not followed."""
    found: list[Path] = []
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        here = Path(root)
        found += [here / name for name in files if not name.endswith(_PASSING)]
        found += [here / name for name in folders if (here / name).is_symlink()]
        if not files and not folders and here != folder:
            found.append(here)
    return sorted(found)


def _file_state(path: Path, folder: Path) -> JsonValue:
    kind = path.lstat()
    if stat.S_ISLNK(kind.st_mode):
        return f"link to {os.readlink(path)}".replace(str(folder), WORKDIR)
    if stat.S_ISDIR(kind.st_mode):
        return "empty folder"
    if not stat.S_ISREG(kind.st_mode):
        return "no regular file"
    with path.open("rb") as file:
        head = file.read(LARGEST_TEXT + 1)
        if head.startswith(_SQLITE):
            try:
                return database_state(path)
            except sqlite3.Error:
                pass  # not one after all, or damaged: its bytes are what there is
        if len(head) <= LARGEST_TEXT:
            try:
                return head.decode("utf-8").replace(str(folder), WORKDIR)
            except UnicodeDecodeError:
                pass
        digest = hashlib.sha256(head)
        while chunk := file.read(1 << 20):
            digest.update(chunk)
        return f"sha256:{digest.hexdigest()}"


def database_state(path: Path) -> JsonObject:
    """`{"tables": {name: {"columns": [...], "types": [...], "rows": [...]}}, "views": {name: SQL}, …}`, rows sorted; indexes and
    triggers like views. The order of rows, the file's bytes and how SQL is spelled say nothing."""
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=2)) as database:
        database.text_factory = _text
        found: JsonObject = {"tables": {}}
        objects = database.execute(
            "select type, name, sql from sqlite_master where name not like 'sqlite_%' order by type, name"
        ).fetchall()
        for kind, name, sql in objects:
            group = found.setdefault("indexes" if kind == "index" else f"{kind}s", {})
            if isinstance(group, dict):
                group[str(name)] = _table(database, str(name)) if kind == "table" else plain_sql(str(sql))
        return found


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def _table(database: sqlite3.Connection, name: str) -> JsonObject:
    quoted = name.replace('"', '""')
    types: list[JsonValue] = [_type(*row[2:6]) for row in database.execute(f'pragma table_xinfo("{quoted}")') if row[6] != HIDDEN]
    cursor = database.execute(f'select * from "{quoted}"')
    columns: list[JsonValue] = [str(column[0]) for column in cursor.description]
    digest: int = 0
    count = 0
    rows: list[list[JsonValue]] = []
    for row in cursor:
        values = [_cell(value) for value in row]
        count += 1
        digest ^= int.from_bytes(hashlib.sha256(repr(values).encode()).digest())  # the same in any order of rows
        if count <= MOST_ROWS:
            rows.append(values)
    if count > MOST_ROWS:
        return {"columns": columns, "types": types, "rows": f"{count} rows, sha256:{digest:064x}"}
    return {"columns": columns, "types": types, "rows": [*sorted(rows, key=repr)]}


def _type(declared: str, filled: int, default: str | None, key: int) -> str:
    """What is declared of a column. Types that SQLite takes for the same integers and texts (INT, VARCHAR(9)) are the same."""
    name = " ".join(declared.upper().split())
    name = "INTEGER" if "INT" in name else "TEXT" if any(part in name for part in ("CHAR", "CLOB", "TEXT")) else name
    more = ("NOT NULL" if filled else "", f"DEFAULT {plain_sql(default)}" if default is not None else "", "PRIMARY KEY" if key else "")
    return " ".join(part for part in (name, *more) if part)


def _cell(value: object) -> JsonValue:
    if isinstance(value, bytes):
        return f"sha256:{hashlib.sha256(value).hexdigest()}"
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    return value if isinstance(value, str | int | float) else None
