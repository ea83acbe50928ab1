"""What a waiting user sees: rollouts done and failed, mean reward, time left, and what is being waited for.

With rich installed it is one live line on standard error; without it, a plain line now and then. Reporting never
changes what is done: every method is cheap and none may raise.
"""

from __future__ import annotations

import importlib.util
import math
import sys
import time
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as RichBar
    from rich.progress import TaskID

PLAIN_SECONDS = 10.0
"""Seconds between two plain lines."""
SOONEST = 10
"""Units run side by side: before a tenth of them is done, their pace says nothing."""
BARS = "▁▂▃▄▅▆▇█"


class Progress(Protocol):
    """Where gather, train and the loop say what they do."""

    def begin(self, what: str, total: int) -> None:
        """A phase of `total` units starts (0: unknown)."""
        ...

    def advance(self, reward: float | None = None) -> None:
        """One unit done, with its reward if it has one."""
        ...

    def failed(self, reason: str) -> None:
        """One unit failed."""
        ...

    def note(self, text: str) -> None:
        """What is happening inside the phase."""
        ...

    def curve(self, rewards: list[float]) -> None:
        """The mean reward of every step so far."""
        ...

    def end(self) -> None: ...


class Silent:
    """Shows nothing."""

    def begin(self, what: str, total: int) -> None: ...

    def advance(self, reward: float | None = None) -> None: ...

    def failed(self, reason: str) -> None: ...

    def note(self, text: str) -> None: ...

    def curve(self, rewards: list[float]) -> None: ...

    def end(self) -> None: ...


def sparkline(values: list[float], width: int = 24) -> str:
    """The last `width` values as block characters between their own minimum and maximum."""
    shown = [value for value in values if math.isfinite(value)][-width:]
    if not shown:
        return ""
    low, span = min(shown), max(shown) - min(shown)
    return "".join(BARS[round((value - low) / span * (len(BARS) - 1))] if span else BARS[0] for value in shown)


class _Counts:
    """The numbers of the current phase, and their line of text."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.done: int = 0
        self.failures: int = 0
        self.reset("", 0)

    def reset(self, what: str, total: int) -> None:
        self.what, self.total, self.text = what, total, ""
        self.done, self.failures = 0, 0
        self.rewards: list[float] = []
        self.started = time.monotonic()

    def line(self) -> str:
        parts = [f"reward {sum(self.rewards) / len(self.rewards):.3f}"] if self.rewards else []
        if self.failures:
            parts.append(f"{self.failures} failed")
        if self.text:
            parts.append(self.text)
        if self.steps:
            parts.append(f"{sparkline(self.steps)} {self.steps[-1]:.3f}")
        return " · ".join(parts)

    def remaining(self) -> str:
        count = self.done + self.failures
        if count < max(1, self.total / SOONEST) or count >= self.total:
            return ""
        seconds = (time.monotonic() - self.started) / count * (self.total - count)
        return f"{int(seconds // 60)}:{int(seconds % 60):02d} left"


class Plain(_Counts):
    """A line on standard error at the start and end of a phase, and now and then between."""

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__()
        self._stream = stream or sys.stderr
        self._last = 0.0

    def begin(self, what: str, total: int) -> None:
        self.reset(what, total)
        self._print(force=True)

    def advance(self, reward: float | None = None) -> None:
        self.done += 1
        if reward is not None:
            self.rewards.append(reward)
        self._print()

    def failed(self, reason: str) -> None:
        self.failures += 1
        self._print()

    def note(self, text: str) -> None:
        changed, self.text = text != self.text, text
        if changed:
            self._print()

    def curve(self, rewards: list[float]) -> None:
        self.steps = rewards

    def end(self) -> None:
        self._print(force=True)

    def _print(self, force: bool = False) -> None:
        now = time.monotonic()
        if not force and now - self._last < PLAIN_SECONDS:
            return
        self._last = now
        count = f" {self.done + self.failures}/{self.total}" if self.total else ""
        tail = [text for text in (self.line(), self.remaining()) if text]
        print(f"{self.what}{count}" + (" · " if tail else "") + " · ".join(tail), file=self._stream, flush=True)


class Rich(_Counts):
    """One live bar per phase; the same numbers."""

    def __init__(self) -> None:
        super().__init__()
        self._bar: RichBar | None = None
        self._task: TaskID | None = None

    def begin(self, what: str, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self.end()
        self.reset(what, total)
        columns = [SpinnerColumn(), TextColumn("{task.description}")]
        columns += [BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()] if total else [TimeElapsedColumn()]
        self._bar = Progress(*columns, TextColumn("{task.fields[line]}", markup=False), console=Console(stderr=True))
        self._task = self._bar.add_task(what, total=total or None, line=self.line())
        self._bar.start()

    def advance(self, reward: float | None = None) -> None:
        self.done += 1
        if reward is not None:
            self.rewards.append(reward)
        self._update()

    def failed(self, reason: str) -> None:
        self.failures += 1
        self._update()

    def note(self, text: str) -> None:
        self.text = text
        self._update()

    def curve(self, rewards: list[float]) -> None:
        self.steps = rewards
        self._update()

    def _update(self) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self.done + self.failures, line=self.line())

    def end(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.stop()


def progress_of(wanted: bool | Progress) -> Progress:
    """True: rich on a terminal, plain lines elsewhere; False: nothing; or the caller's own."""
    if not isinstance(wanted, bool):
        return wanted
    if not wanted:
        return Silent()
    in_notebook = "ipykernel" in sys.modules
    if (sys.stderr.isatty() or in_notebook) and importlib.util.find_spec("rich") is not None:
        return Rich()
    return Plain()
