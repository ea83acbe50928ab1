"""The report of a run: one HTML file that needs nothing else (inline SVG, no scripts), and the same as JSON.

It has the reward curve, before/after bars with 95 % intervals, and what the model said before and after, side by side.
All text is escaped: what a model or a user wrote is never markup here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from pydantic import Field, JsonValue

from ..records import Record

WIDTH, HEIGHT, MARGIN = 720, 260, 56


class Curve(Record):
    """One line of a chart: (step, value) points."""

    name: str
    points: tuple[tuple[float, float], ...]


class Bar(Record):
    """A mean with its interval."""

    name: str
    mean: float
    low: float
    high: float
    n: int
    note: str = ""


class Breakdown(Record):
    """One chart with a row for each part (a tool, a difficulty) and in it one bar for each evaluation."""

    title: str
    rows: dict[str, tuple[Bar, ...]]


class Sample(Record):
    """One scenario's transcripts, by the name of the evaluation."""

    title: str
    texts: dict[str, str]
    rewards: dict[str, float | None]
    measure: str = "reward"
    """What the rewards are called."""
    expected: str = ""
    """What would have been right, if that is known."""


class Report(Record):
    title: str
    summary: tuple[str, ...] = ()
    """Sentences."""
    facts: dict[str, JsonValue] = Field(default_factory=dict)
    bars: tuple[Bar, ...] = ()
    breakdowns: tuple[Breakdown, ...] = ()
    curves: tuple[Curve, ...] = ()
    samples: tuple[Sample, ...] = ()


def write_report(folder: Path, report: Report) -> Path:
    """`report.json` and `report.html` in the folder, each whole or not at all; the HTML file's path."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "report.json", report.model_dump_json(indent=2))
    write_whole(folder / "report.html", render_html(report))
    return folder / "report.html"


def write_whole(path: Path, text: str) -> None:
    """Whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8", errors="replace")
    temporary.replace(path)


def render_html(report: Report) -> str:
    """The whole page."""
    parts = [f"<h1>{escape(report.title)}</h1>"]
    parts += [f"<p>{escape(line)}</p>" for line in report.summary]
    if report.bars:
        parts.append(f"<h2>Before and after</h2>{bars_svg(report.bars)}{_bar_table(report.bars)}")
    parts += [f"<h2>{escape(part.title)}</h2>{breakdown_svg(part)}" for part in report.breakdowns if part.rows]
    parts += [f"<h2>{escape(curve.name)}</h2>{curve_svg(curve)}" for curve in report.curves if len(curve.points) > 1]
    if report.samples:
        parts.append("<h2>Samples</h2>" + "".join(_sample(sample) for sample in report.samples))
    if report.facts:
        rows = "".join(f"<tr><th>{escape(key)}</th><td>{escape(_text(value))}</td></tr>" for key, value in report.facts.items())
        parts.append(f"<h2>Settings</h2><table>{rows}</table>")
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(report.title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n'
    )


def curve_svg(curve: Curve) -> str:
    """A line chart with its axes' ends named."""
    points = [(x, y) for x, y in curve.points if math.isfinite(x) and math.isfinite(y)]
    if not points:
        return "<p>no values</p>"
    xs, ys = [x for x, _ in points], [y for _, y in points]
    low, high = _padded(min(ys), max(ys))

    def at(x: float, y: float) -> tuple[float, float]:
        span = max(xs) - min(xs)
        share = (x - min(xs)) / span if span else 0.5
        return MARGIN + share * (WIDTH - 2 * MARGIN), HEIGHT - MARGIN - (y - low) / (high - low) * (HEIGHT - 2 * MARGIN)

    placed = [at(x, y) for x, y in points]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"><title>step {_number(a)}: {_number(b)}</title></circle>'
        for (x, y), (a, b) in zip(placed, points, strict=True)
    )
    labels = (
        _label(MARGIN, HEIGHT - MARGIN + 18, _number(min(xs)))
        + _label(WIDTH - MARGIN, HEIGHT - MARGIN + 18, _number(max(xs)), "end")
        + _label(MARGIN - 6, HEIGHT - MARGIN, _number(low), "end")
        + _label(MARGIN - 6, MARGIN + 4, _number(high), "end")
    )
    return _svg(HEIGHT, curve.name, f'{_axes()}<polyline points="{line}"/>{dots}{labels}')


def bars_svg(bars: Sequence[Bar]) -> str:
    """Vertical bars from zero with their intervals as whiskers."""
    low, high = _padded(min(0.0, *(bar.low for bar in bars)), max(0.0, *(bar.high for bar in bars)))
    slot = (WIDTH - 2 * MARGIN) / len(bars)

    def y(value: float) -> float:
        return HEIGHT - MARGIN - (value - low) / (high - low) * (HEIGHT - 2 * MARGIN)

    shapes: list[str] = []
    for index, bar in enumerate(bars):
        centre, width = MARGIN + slot * (index + 0.5), min(80.0, slot * 0.6)
        top, base = min(y(bar.mean), y(0.0)), max(y(bar.mean), y(0.0))
        shapes.append(f'<rect x="{centre - width / 2:.1f}" y="{top:.1f}" width="{width:.1f}" height="{max(base - top, 0.5):.1f}"/>')
        shapes.append(f'<path class="whisker" d="M{centre:.1f} {y(bar.low):.1f}V{y(bar.high):.1f}"/>')
        for end in (bar.low, bar.high):
            shapes.append(f'<path class="whisker" d="M{centre - 8:.1f} {y(end):.1f}h16"/>')
        shapes.append(_label(centre, HEIGHT - MARGIN + 18, bar.name, "middle"))
        shapes.append(_label(centre + 12, y(bar.mean) - 6, _number(bar.mean)))
    labels = _label(MARGIN - 6, HEIGHT - MARGIN, _number(low), "end") + _label(MARGIN - 6, MARGIN + 4, _number(high), "end")
    return _svg(HEIGHT, "means with 95 % intervals", _axes() + "".join(shapes) + labels)


def breakdown_svg(breakdown: Breakdown) -> str:
    """Horizontal bars from 0 to 1, grouped by row, with their intervals as whiskers; the first evaluation is the palest."""
    left, bar_height, gap = 190, 16, 14
    span = WIDTH - left - MARGIN
    shapes: list[str] = []
    y = 8.0
    for name, bars in breakdown.rows.items():
        shapes.append(_label(left - 10, y + bar_height * len(bars) / 2 + 4, name if len(name) < 28 else name[:27] + "…", "end"))
        for index, bar in enumerate(bars):
            opacity = 0.25 + 0.65 * (index + 1) / len(bars)
            tip = f"{bar.name}: {bar.mean:.0%} ({bar.low:.0%} to {bar.high:.0%}, n = {bar.n})"
            width = max(min(bar.mean, 1.0), 0.0) * span
            middle = y + bar_height / 2
            shapes.append(
                f'<rect x="{left}" y="{y:.1f}" width="{max(width, 1):.1f}" height="{bar_height - 3}" style="opacity:{opacity:.2f}">'
                f"<title>{escape(tip)}</title></rect>"
            )
            shapes.append(f'<path class="whisker" d="M{left + bar.low * span:.1f} {middle - 1.5:.1f}H{left + bar.high * span:.1f}"/>')
            shapes.append(_label(WIDTH - MARGIN + 6, middle + 3, f"{bar.mean:.0%}"))
            y += bar_height
        y += gap
    names = " · ".join(bar.name for bar in next(iter(breakdown.rows.values())))
    return f"<p>From above: {escape(names)}. Lines are 95 % intervals.</p>{_svg(round(y), breakdown.title, ''.join(shapes))}"


def _bar_table(bars: Sequence[Bar]) -> str:
    head = "<tr><th>evaluation</th><th>mean</th><th>95 % interval</th><th>scenarios</th><th></th></tr>"
    rows = "".join(
        f"<tr><td>{escape(bar.name)}</td><td>{_number(bar.mean)}</td><td>{_number(bar.low)} to {_number(bar.high)}</td>"
        f"<td>{bar.n}</td><td>{escape(bar.note)}</td></tr>"
        for bar in bars
    )
    return f"<table>{head}{rows}</table>"


def _sample(sample: Sample) -> str:
    columns = "".join(
        f"<div><h4>{escape(name)} · {escape(sample.measure)} {_text(sample.rewards.get(name))}</h4><pre>{escape(text)}</pre></div>"
        for name, text in sample.texts.items()
    )
    expected = f"<h4>expected</h4><pre>{escape(sample.expected)}</pre>" if sample.expected else ""
    return f'<section><h3>{escape(sample.title)}</h3>{expected}<div class="sides">{columns}</div></section>'


def _svg(height: int, label: str, content: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">{content}</svg>'


def _axes() -> str:
    return f'<path class="axis" d="M{MARGIN} {MARGIN}V{HEIGHT - MARGIN}H{WIDTH - MARGIN}"/>'


def _label(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _padded(low: float, high: float) -> tuple[float, float]:
    """The axis: 0 to 1 for what lies there (rewards, shares), so that charts compare; else just the values' range."""
    if low >= 0.0 and high <= 1.0:
        return 0.0, 1.0
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _number(value: float) -> str:
    return f"{value:.3g}"


def _text(value: JsonValue) -> str:
    if isinstance(value, float):
        return _number(value)
    return "none" if value is None else str(value)


STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}"
    "svg{width:100%;height:auto}polyline{fill:none;stroke:#2563eb;stroke-width:2}circle,rect{fill:#2563eb}rect{opacity:.75}"
    ".axis{stroke:#999;fill:none}.whisker{stroke:#111;stroke-width:1.5;fill:none}text{font-size:12px;fill:#444}"
    "table{border-collapse:collapse}th,td{text-align:left;padding:.2rem .8rem;border-bottom:1px solid #ddd;vertical-align:top}"
    ".sides{display:grid;grid-template-columns:repeat(auto-fit,minmax(18rem,1fr));gap:1rem}"
    "pre{white-space:pre-wrap;overflow-wrap:anywhere;background:#f6f6f6;padding:.7rem;border-radius:.4rem}"
)
