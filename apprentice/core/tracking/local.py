"""Metrics on the local disk: one JSON object a line, one line a step. Readable while it grows, and by anything."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from pydantic import JsonValue

from ..errors import ConfigError

Row = dict[str, JsonValue]


class JsonlMetrics:
    """`<path>`, a row per step. A step that is logged again replaces nothing and is not doubled: the first row counts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._rows = self._load()

    def _load(self) -> list[Row]:
        """The whole rows; half a line at the end, left by a crash, is cut off."""
        if not self.path.exists():
            return []
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            with self.path.open("r+b") as file:
                file.truncate(len(whole))
                os.fsync(file.fileno())
        rows: list[Row] = []
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                rows.append(json.loads(line))
            except ValueError as cause:
                raise ConfigError(f"line {number} of {self.path} is not JSON; move the file away to start a new one") from cause
        return rows

    def log(self, step: int, values: Mapping[str, JsonValue]) -> bool:
        """Write the row of a step to disk. False, and nothing written, if the step has a row already."""
        if any(row.get("step") == step for row in self._rows):
            return False
        row: Row = {"step": step, **values}
        line = json.dumps(row, ensure_ascii=False, allow_nan=False)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._rows.append(row)
        return True

    def rows(self) -> list[Row]:
        """All rows, in the order written."""
        return list(self._rows)

    def column(self, name: str) -> list[tuple[float, float]]:
        """(step, value) of every row that has the metric as a number."""
        points: list[tuple[float, float]] = []
        for row in self._rows:
            step, value = row.get("step"), row.get(name)
            if isinstance(step, int | float) and isinstance(value, int | float):
                points.append((float(step), float(value)))
        return points
