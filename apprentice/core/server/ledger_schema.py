"""The ledger's file: its tables, its migrations, its process lock, and the words for what SQLite reports.

Knows SQLite and the error tree; knows no records. A schema version is `PRAGMA user_version`, and `STEPS[n]` is the SQL
that leads from version n to n + 1: a released step is never edited, a change is a new step.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from ..errors import InvalidRequest, LedgerError, LedgerFull, LedgerLocked, LedgerVersionError

APPLICATION_ID = 0x41505254
"""`APRT` in SQLite's header: another program's database is never taken for a ledger."""

_RUNS = """
CREATE TABLE policies (
  seq INTEGER PRIMARY KEY, policy TEXT NOT NULL UNIQUE, body BLOB NOT NULL, at REAL NOT NULL);
CREATE TABLE trajectories (
  seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, policy TEXT NOT NULL, scenario_id TEXT, group_id TEXT,
  status TEXT NOT NULL, error TEXT, metadata BLOB NOT NULL, created_at REAL NOT NULL, finished_at REAL);
CREATE INDEX trajectories_by_policy ON trajectories (policy);
CREATE INDEX trajectories_by_status ON trajectories (status);
CREATE INDEX trajectories_by_group ON trajectories (group_id);
CREATE TABLE status_changes (
  seq INTEGER PRIMARY KEY, trajectory INTEGER NOT NULL REFERENCES trajectories, status TEXT NOT NULL,
  body BLOB NOT NULL, at REAL NOT NULL);
CREATE INDEX status_changes_by_trajectory ON status_changes (trajectory);
CREATE TABLE rewards (
  seq INTEGER PRIMARY KEY, trajectory INTEGER NOT NULL REFERENCES trajectories, body BLOB NOT NULL, at REAL NOT NULL);
CREATE INDEX rewards_by_trajectory ON rewards (trajectory);
CREATE TABLE blobs (
  seq INTEGER PRIMARY KEY, hash BLOB NOT NULL UNIQUE, data BLOB NOT NULL);
CREATE TABLE completions (
  seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, call_id TEXT NOT NULL, trajectory INTEGER REFERENCES trajectories,
  policy TEXT NOT NULL, policy_version INTEGER, parent TEXT, created_at REAL NOT NULL,
  base INTEGER REFERENCES completions, prefix INTEGER NOT NULL, rest BLOB, rest_blob INTEGER REFERENCES blobs,
  tokens BLOB NOT NULL, logprobs BLOB NOT NULL, sampling_logprobs BLOB,
  message_prefix INTEGER NOT NULL, messages BLOB NOT NULL, reply INTEGER NOT NULL REFERENCES blobs,
  settings INTEGER NOT NULL REFERENCES blobs, meta BLOB NOT NULL, lineage BLOB,
  text_key INTEGER, checksum INTEGER NOT NULL);
CREATE INDEX completions_by_trajectory ON completions (trajectory, text_key);
CREATE INDEX completions_by_policy ON completions (policy);
CREATE INDEX completions_unattributed ON completions (call_id) WHERE trajectory IS NULL;
CREATE TABLE tool_calls (
  tool_call_id TEXT NOT NULL, completion INTEGER NOT NULL REFERENCES completions,
  PRIMARY KEY (tool_call_id, completion)) WITHOUT ROWID;
CREATE TABLE tool_events (
  seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, trajectory INTEGER NOT NULL REFERENCES trajectories,
  body BLOB NOT NULL, at REAL NOT NULL);
CREATE INDEX tool_events_by_trajectory ON tool_events (trajectory);
"""

_JOBS = """
CREATE TABLE jobs (
  seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, policy TEXT NOT NULL, kind TEXT NOT NULL, state TEXT NOT NULL,
  phase TEXT NOT NULL, created_at REAL NOT NULL, updated_at REAL NOT NULL, result BLOB, request BLOB NOT NULL,
  idempotency_key TEXT UNIQUE, request_hash BLOB NOT NULL);
CREATE INDEX jobs_by_state ON jobs (state);
CREATE TABLE job_events (
  job INTEGER NOT NULL REFERENCES jobs, seq INTEGER NOT NULL, body BLOB NOT NULL,
  PRIMARY KEY (job, seq)) WITHOUT ROWID;
CREATE TABLE checkpoints (
  policy TEXT NOT NULL, step INTEGER NOT NULL, path TEXT NOT NULL, created_at REAL NOT NULL, metrics BLOB NOT NULL,
  pinned INTEGER NOT NULL, deleted INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (policy, step)) WITHOUT ROWID;
"""

STEPS: tuple[str, ...] = (_RUNS, _JOBS)
SCHEMA_VERSION = len(STEPS)

_FULL = {"SQLITE_FULL", "SQLITE_IOERR_WRITE", "SQLITE_IOERR_SHMSIZE", "SQLITE_IOERR_TRUNCATE"}
"""SQLite says SQLITE_FULL for ENOSPC only; a quota or file-size limit arrives as a failed write."""


def connect(path: Path, *, busy_timeout: float, read_only: bool = False) -> sqlite3.Connection:
    """A connection that can move between threads, with explicit transactions. `read_only` refuses every write."""
    if read_only and not path.is_file():
        raise LedgerError(f"there is no ledger at {path}")
    try:
        mode = "rw" if read_only else "rwc"
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode={mode}", uri=True, timeout=busy_timeout, isolation_level=None, check_same_thread=False
        )
        try:
            connection.execute("PRAGMA foreign_keys = ON")
            if read_only:
                connection.execute("PRAGMA query_only = ON")
        except sqlite3.Error:
            connection.close()
            raise
    except sqlite3.Error as error:
        raise as_ledger_error(error, path) from error
    return connection


def prepare_writer(connection: sqlite3.Connection, path: Path) -> None:
    """Check whose file it is, switch it to WAL, and migrate it to this version."""
    try:
        version, owner = _identity(connection)
        if version > 0 or owner != 0 or _has_tables(connection):
            _check_identity(version, owner, path, STEPS)
        if connection.execute("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
            raise LedgerError(f"the ledger {path} needs a file system with shared memory (SQLite's WAL mode), and this one has none")
        connection.execute("PRAGMA synchronous = NORMAL")
        migrate(connection, STEPS)
    except sqlite3.Error as error:
        raise as_ledger_error(error, path) from error


def check_reader(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse a file that is no ledger or has another schema version; a reader cannot migrate."""
    try:
        version, owner = _identity(connection)
    except sqlite3.Error as error:
        raise as_ledger_error(error, path) from error
    _check_identity(version, owner, path, STEPS)
    if version < SCHEMA_VERSION:
        raise LedgerVersionError(
            f"the ledger {path} has schema version {version} and this Apprentice reads version {SCHEMA_VERSION}: "
            f"start `apprentice serve` on it once to migrate it"
        )


def migrate(connection: sqlite3.Connection, steps: Sequence[str]) -> None:
    """Run the steps that the file lacks, each in a transaction of its own with its version number."""
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    for number in range(version, len(steps)):
        statements = [f"PRAGMA user_version = {number + 1}", f"PRAGMA application_id = {APPLICATION_ID}"]
        connection.execute("BEGIN IMMEDIATE")
        try:
            for statement in (*_statements(steps[number]), *statements):
                connection.execute(statement)
            connection.execute("COMMIT")
        except sqlite3.Error:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise


def as_ledger_error(error: sqlite3.Error, path: Path) -> LedgerError:
    """The typed error, with a sentence for the user, of what SQLite reported about the file at `path`."""
    name = str(getattr(error, "sqlite_errorname", ""))
    if name in _FULL:
        return LedgerFull(f"the ledger {path} could not be written because its disk is full ({error}); nothing of this call was kept")
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return LedgerLocked(f"the ledger {path} is locked by another process and did not become free within the busy timeout ({error})")
    if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
        return LedgerError(f"the ledger {path} is damaged or no ledger at all ({error}); restore it from a copy or name another file")
    return LedgerError(f"the ledger {path} could not be used: {error}")


def as_typed_error(error: Exception, path: Path) -> Exception:
    """The error to give a caller whose work on the file at `path` raised `error`; errors of no known kind stay as they are.

    SQLite can neither hold nor look for text with lone surrogates or integers beyond 64 bits: that is the caller's request.
    Any other ValueError comes from decoding what is stored, since whatever is written was validated before.
    """
    if isinstance(error, sqlite3.Error):
        return as_ledger_error(error, path)
    if isinstance(error, UnicodeEncodeError):
        return InvalidRequest(f"expected text that UTF-8 can spell, got a lone surrogate in {error.object!r}")
    if isinstance(error, OverflowError):
        return InvalidRequest(f"expected integers of at most 64 bits, got a larger one ({error})")
    if isinstance(error, ValueError):
        return LedgerError(f"a record in the ledger {path} is damaged: {str(error).splitlines()[0]}")
    return error


@contextmanager
def read_transaction(connection: sqlite3.Connection, path: Path) -> Generator[sqlite3.Connection]:
    """One consistent snapshot; whatever SQLite finds wrong becomes a LedgerError or an InvalidRequest."""
    try:
        connection.execute("BEGIN")
        try:
            yield connection
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
    except (sqlite3.Error, ValueError, OverflowError) as error:
        raise as_typed_error(error, path) from error


class ProcessLock:
    """At most one writing process per ledger. The operating system frees it when the process dies, however it dies."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = FileLock(f"{path}.lock", thread_local=False)
        self._owner = Path(f"{path}.owner")

    def acquire(self) -> None:
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise LedgerLocked(
                f"the ledger {self._path} is in use by process {self._owner_pid()}: stop that server or give this one another ledger"
            ) from error
        except OSError as error:
            raise LedgerError(f"the lock file {self._path}.lock could not be taken: {error}") from error
        try:
            self._owner.write_text(str(os.getpid()))
        except OSError as error:
            self._lock.release()
            raise LedgerError(f"the file {self._owner} could not be written: {error}") from error

    def release(self) -> None:
        self._owner.unlink(missing_ok=True)
        self._lock.release()

    def _owner_pid(self) -> str:
        try:
            return self._owner.read_text().strip() or "(unknown)"
        except OSError:
            return "(unknown)"


def _identity(connection: sqlite3.Connection) -> tuple[int, int]:
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    return version, int(connection.execute("PRAGMA application_id").fetchone()[0])


def _has_tables(connection: sqlite3.Connection) -> bool:
    return connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone() is not None


def _check_identity(version: int, owner: int, path: Path, steps: Sequence[str]) -> None:
    if owner != APPLICATION_ID:
        raise LedgerError(f"the file {path} is a SQLite database of another program, not a ledger of Apprentice")
    if version > len(steps):
        raise LedgerVersionError(
            f"the ledger {path} has schema version {version} and this Apprentice knows versions up to {len(steps)}: "
            f"upgrade Apprentice or name another ledger"
        )


def _statements(script: str) -> list[str]:
    return [statement for part in script.split(";\n") if (statement := part.strip().rstrip(";"))]
