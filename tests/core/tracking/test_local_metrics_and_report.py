"""Metrics as JSON lines, and the report as one page."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from apprentice.core.errors import ConfigError
from apprentice.core.tracking.local import JsonlMetrics
from apprentice.core.tracking.report import Bar, Curve, Report, Sample, bars_svg, curve_svg, render_html, write_report


def test_a_step_has_one_row_however_often_it_is_logged(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "metrics.jsonl"
    metrics = JsonlMetrics(path)
    assert metrics.log(1, {"loss": 0.5})
    assert not metrics.log(1, {"loss": 0.7})
    again = JsonlMetrics(path)
    assert not again.log(1, {"loss": 0.9})
    assert again.log(2, {"loss": 0.25, "status": "trained"})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1, "loss": 0.5},
        {"step": 2, "loss": 0.25, "status": "trained"},
    ]
    assert again.column("loss") == [(1.0, 0.5), (2.0, 0.25)]
    assert again.column("status") == []


@pytest.mark.parametrize("cut", range(1, 22))
def test_half_a_row_left_by_a_crash_is_cut_off_and_can_be_written_again(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "metrics.jsonl"
    JsonlMetrics(path).log(1, {"loss": 0.5})
    whole = path.read_bytes()
    JsonlMetrics(path).log(2, {"loss": 0.25})
    path.write_bytes(path.read_bytes()[: len(whole) + cut])
    metrics = JsonlMetrics(path)
    assert [row["step"] for row in metrics.rows()] == [1]
    assert metrics.log(2, {"loss": 0.25})
    assert [row["step"] for row in JsonlMetrics(path).rows()] == [1, 2]


def test_a_file_that_is_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("not json\n")
    with pytest.raises(ConfigError, match="line 1"):
        JsonlMetrics(path)


class Page(HTMLParser):
    """Tags in the order met, and whether each was closed."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


EVIL = '</pre><script>alert("x")</script><img src=http://evil/x.png>'

REPORT = Report(
    title=f"mail/agent {EVIL}",
    summary=(EVIL,),
    facts={"base model": EVIL, "steps": 3, "best": None},
    bars=(Bar(name="before", mean=0.2, low=0.1, high=0.3, n=20), Bar(name=EVIL, mean=0.8, low=0.7, high=0.9, n=20, note=EVIL)),
    curves=(Curve(name="reward", points=((1.0, 0.1), (2.0, 0.5), (3.0, float("nan")))),),
    samples=(Sample(title=EVIL, texts={"before": EVIL, "after": "good"}, rewards={"before": 0.0, "after": 1.0}),),
)


def test_the_page_needs_nothing_else_and_runs_nothing() -> None:
    page = Page()
    page.feed(render_html(REPORT))
    assert not {"script", "img", "link", "iframe", "object"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name in ("src", "href") or name.startswith("on")]
    assert page.tags.count("svg") == 2
    assert EVIL in page.text


def test_both_files_are_written_and_hold_the_same(tmp_path: Path) -> None:
    report = REPORT.model_copy(update={"curves": ()})
    path = write_report(tmp_path / "run", report)
    assert path.read_text(encoding="utf-8") == render_html(report)
    assert Report.model_validate_json((tmp_path / "run" / "report.json").read_bytes()) == report
    assert sorted(file.name for file in path.parent.iterdir()) == ["report.html", "report.json"]


def test_a_curve_is_drawn_to_scale() -> None:
    svg = curve_svg(Curve(name="reward", points=((0.0, 0.0), (5.0, 1.0), (10.0, 0.5))))
    assert 'points="56.0,204.0 360.0,56.0 664.0,130.0"' in svg
    assert "step 5: 1" in svg
    assert "no values" in curve_svg(Curve(name="x", points=((1.0, float("inf")),)))
    assert 'points="360.0,130.0"' in curve_svg(Curve(name="one", points=((3.0, 2.0),)))


def test_bars_start_at_zero_and_carry_their_interval() -> None:
    svg = bars_svg([Bar(name="before", mean=0.5, low=0.25, high=1.0, n=4)])
    assert '<rect x="320.0" y="130.0" width="80.0" height="74.0"/>' in svg
    assert 'd="M360.0 167.0V56.0"' in svg
