"""Reports as HTML: well-formed, self-contained, escaped, and as large as their numbers."""

import dataclasses
import io
import re
import xml.etree.ElementTree as ElementTree

import pytest
from rich.console import Console

from isoshard.planner.reports.comparison import compare
from isoshard.planner.reports.report import CollectiveUse, LiveArray, TimelineEvent
from tests.planner.reports.sample_reports import GIB, UP, fitting, too_large

NASTY = "<script>alert('&\"')</script>"


def parsed(html):
    """The fragment as a tree; it is written so that XML reads it."""
    return ElementTree.fromstring(html)


def pictures(tree):
    return {svg.get("aria-label"): svg for svg in tree.iter("svg") if svg.get("aria-label")}


def rectangles(picture, kind):
    return [rect for rect in picture.iter("rect") if rect.get("class") == kind]


@pytest.mark.parametrize("report", [fitting(), too_large()], ids=["fits", "too large"])
def test_it_is_well_formed_and_loads_nothing(report):
    html = report._repr_html_()
    tree = parsed(html)
    assert tree.tag == "div"
    assert len(pictures(tree)) == 4
    assert not re.search(r"https?:|src=|href=|url\(|@import|<script|<link", html)
    assert "prefers-color-scheme:dark" in html and "data-jp-theme-light" in html
    text = " ".join(parsed(fitting().to_html()).itertext())
    for sentence in (
        "fits, 10.4 GiB of 14.9 GiB (70 %)",
        "Plan.fsdp('data') * Plan.tensor_parallel('model')",
        "llama.py:43 (forward)",
        "collectives hide behind computing of the same layer",
        "assumed: a while loop is counted as one run",
        "all is well",
        "jaxlib 0.10.2",
    ):
        assert sentence in text
    assert "does not fit, 130.0 GiB is 55.5 GiB over" in too_large().to_html()


def test_bars_of_memory_are_as_wide_as_their_bytes():
    bars = pictures(parsed(too_large().to_html()))["memory of one device by role"]
    widths = {
        role: float(rectangles(bars, f"fill-{role}")[0].get("width"))
        for role in ("parameters", "optimizer", "activations")
    }
    assert widths["optimizer"] / widths["parameters"] == pytest.approx(2, rel=0.01)
    assert widths["activations"] / widths["parameters"] == pytest.approx(4 / 3, rel=0.01)
    [limit] = [line for line in bars.iter("line") if line.get("class") == "limit"]
    first = rectangles(bars, "fill-parameters")[0]
    share = (float(limit.get("x1")) - float(first.get("x"))) / sum(widths.values())
    assert share == pytest.approx(80e9 / (130 * GIB), rel=0.01)
    units = [label.text for label in bars.iter("text") if label.get("class") == "dim"]
    assert units == ["0 GiB", "20", "40", "60", "80", "100", "120"]


def test_a_long_timeline_is_no_long_page():
    events = tuple(
        TimelineEvent("compute" if n % 2 else "all-gather", () if n % 2 else ("data",), n * 1e-5,
                      1e-5, n, UP)
        for n in range(50_000)
    )  # fmt: skip
    assert len(fitting(timeline=events).to_html()) < 100_000
    html = fitting(timeline=()).to_html()
    assert "Timeline" not in html and len(pictures(parsed(html))) == 3


def test_text_is_escaped():
    live = LiveArray(NASTY * 3, (2,), NASTY, GIB, NASTY)
    memory = dataclasses.replace(fitting().memory, largest=(live,), peak_line=NASTY)
    use = CollectiveUse(NASTY, (NASTY,), 1, 1, NASTY, 1.0, NASTY)
    time = dataclasses.replace(
        fitting().time, limit=NASTY, assumptions=(NASTY,), collectives={NASTY: 1.0}
    )
    event = TimelineEvent(NASTY, (NASTY,), 0.0, 1.0, 5, NASTY)
    report = fitting(
        step=NASTY, framework=NASTY, topology=NASTY, mesh={NASTY: 4}, plan=NASTY, memory=memory,
        collectives=(use,), time=time, advice=(NASTY,), timeline=(event,), versions={NASTY: NASTY},
        assumptions=(NASTY,),
    )  # fmt: skip
    for html in (report.to_html(), compare({NASTY: report, "b": report}).to_html()):
        assert "<script" not in html
        parsed(html)


@pytest.mark.parametrize(
    ("topology", "mesh", "cells", "lines"),
    [
        ("v5e:16x16", {"data": 16, "model": 16}, 256, 0),
        ("h100:2x8", {"data": 2, "model": 8}, 16, 8),
        ("v5e:2*4x4", {"pod": 2, "data": 4, "model": 4}, 16, 0),
        ("v5p:8x8x8", {"data": 64, "model": 8}, 15 * 8, 0),
        ("nothing:3", {"data": 3}, 3, 0),
    ],
)
def test_the_mesh(topology, mesh, cells, lines):
    html = fitting(topology=topology, mesh=mesh).to_html()
    picture = pictures(parsed(html))["the mesh and its traffic"]
    assert len(rectangles(picture, "cell")) == cells
    assert len([line for line in picture.iter("line") if line.get("class") == "border"]) == lines


def test_a_page(tmp_path):
    path = tmp_path / "report.html"
    fitting().write_html(path)
    text = path.read_text()
    assert text.startswith('<!DOCTYPE html>\n<html lang="en">')
    assert "<title>train_step on v5e:16x16</title>" in text
    assert text.count('<div class="isoshard-report">') == 1


class TestComparison:
    def reports(self):
        time = dataclasses.replace(
            fitting().time, collectives={"data": 0.5}, serial=1.1, overlapped=0.8
        )
        memory = dataclasses.replace(fitting().memory, peak=6 * GIB)
        slower = fitting(plan="Plan.fsdp('data')", time=time, memory=memory)
        return {"both": fitting(), "fsdp": slower, "data": too_large()}

    def test_the_difference_in_words(self):
        assert compare(self.reports()).difference == (
            "data does not fit, by 55.5 GiB. Of those that fit, both is fastest, 606 ms. fsdp "
            "takes 194 ms more (collectives over data +308 ms), and 4.4 GiB less memory."
        )
        assert compare([too_large(), too_large()]).difference == (
            "plan 1 does not fit, by 55.5 GiB. plan 2 does not fit, by 55.5 GiB. None fits."
        )
        assert compare([fitting(), fitting()]).difference == (
            "plan 1 is fastest, 606 ms. plan 2 takes as long."
        )
        first, second = fitting(plan="a"), fitting(plan="b")  # names are plans where they are short
        assert list(compare([first, second]).reports) == ["a", "b"]
        with pytest.raises(ValueError, match="nothing to compare: give at least one report"):
            compare([])

    def test_the_table(self):
        text = str(compare(self.reports()))
        rows = {line.split("  ")[0]: line.split()[1:] for line in text.splitlines()}
        assert rows["fits"] == ["yes", "yes", "no"]
        assert rows["peak"] == ["10.4", "GiB", "6.0", "GiB", "130.0", "GiB"]
        assert rows["step"] == ["606", "ms", "800", "ms", "1.40", "s"]
        for width in (10, 40, 80):
            console = Console(file=io.StringIO(), width=width)
            compare(self.reports()).show(console=console)
            assert max(map(len, console.file.getvalue().splitlines())) <= width

    def test_the_best_of_those_that_fit_are_marked(self):
        tree = parsed(compare(self.reports()).to_html())
        marked = [cell.text for cell in tree.iter("td") if cell.get("class") == "number best"]
        assert marked[:2] == ["6.0 GiB", "606 ms"]

    def test_a_page_with_all(self, tmp_path):
        path = tmp_path / "plans.html"
        compare(self.reports()).write_html(path)
        assert path.read_text().count('<div class="isoshard-report">') == 4
        compare(self.reports()).write_html(path, whole=False)
        assert path.read_text().count('<div class="isoshard-report">') == 1
