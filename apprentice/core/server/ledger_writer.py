"""The one thread that writes the ledger, with group commit. Knows transactions; knows nothing of what is written.

Whatever piece of work waits when the thread comes round goes into one transaction, each piece inside a savepoint of its
own: a piece that raises is undone alone and its caller alone hears of it. If SQLite itself fails (full disk, lock), the
whole transaction is undone and the pieces are tried again one by one, so that one which still fits is kept and each
caller gets its own answer. A caller's future is resolved only after the commit.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from ..errors import LedgerError
from .ledger_schema import as_typed_error

T = TypeVar("T")

MAX_BATCH = 256


@dataclass(slots=True)
class _Task:
    """`value` is Any because one queue holds work of every result type; `submit` ties the types together."""

    work: Callable[[sqlite3.Connection], Any]
    future: Future[Any]
    value: Any = None
    error: Exception | None = None


class GroupCommitWriter:
    """Owns `connection` from now on. `on_undo` is called whenever rows that were written are undone."""

    def __init__(self, connection: sqlite3.Connection, path: Path, on_undo: Callable[[], None]) -> None:
        self._connection = connection
        self._path = path
        self._on_undo = on_undo
        self._queue: SimpleQueue[_Task | None] = SimpleQueue()
        self._gate = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="ledger-writer", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[sqlite3.Connection], T]) -> Future[T]:
        """Queue `work`. It may run more than once, each time on a state as if it had not run before. Cannot be cancelled."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()
        with self._gate:
            if self._closed:
                raise LedgerError(f"the ledger {self._path} is closed")
            self._queue.put(_Task(work, future))
        return future

    def close(self) -> None:
        """Write what is queued, then end the thread and the connection."""
        with self._gate:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        open_ = True
        while open_:
            tasks: list[_Task] = []
            task = self._queue.get()
            while task is not None:
                tasks.append(task)
                if len(tasks) == MAX_BATCH:
                    break
                try:
                    task = self._queue.get_nowait()
                except Empty:
                    break
            else:
                open_ = False
            if tasks:
                self._commit(tasks)
        self._connection.close()

    def _commit(self, tasks: list[_Task]) -> None:
        try:
            self._transaction(tasks)
        except Exception as error:  # noqa: BLE001 - the supervised boundary: the callers get it through their futures
            if len(tasks) > 1 and not _is_busy(error):
                for task in tasks:
                    self._commit([task])
                return
            for task in tasks:
                task.error = as_typed_error(error, self._path)
                task.error.__cause__ = error if task.error is not error else None
        for task in tasks:
            if task.error is not None:
                task.future.set_exception(task.error)
            else:
                task.future.set_result(task.value)

    def _transaction(self, tasks: list[_Task]) -> None:
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            for task in tasks:
                self._savepoint(task)
            connection.execute("COMMIT")
        except BaseException:
            self._on_undo()
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise

    def _savepoint(self, task: _Task) -> None:
        """Run one piece of work; its own error is kept for its caller, an error of SQLite's ends the transaction."""
        connection = self._connection
        before = connection.total_changes
        task.error = None
        connection.execute("SAVEPOINT task")
        try:
            task.value = task.work(connection)
        except sqlite3.Error:
            raise
        except Exception as error:  # noqa: BLE001 - the supervised boundary: the caller gets it through its future
            task.error = as_typed_error(error, self._path)
            connection.execute("ROLLBACK TO task")
            if connection.total_changes != before:
                self._on_undo()
        connection.execute("RELEASE task")


def _is_busy(error: Exception) -> bool:
    return str(getattr(error, "sqlite_errorname", "")).startswith(("SQLITE_BUSY", "SQLITE_LOCKED"))
