"""What domain operators send: the formulas on few devices, and what is kept of many."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks import domain_scaling
from benchmarks.scaling import figure, report
from benchmarks.scaling.cases import WAYS
from benchmarks.scaling.operators import CASES
from tools.harness import results as kept

DOCS = Path(__file__).parents[2] / "docs"

QUICK = ("halo_exchange, 2 rows, wrap", "max_pool 3, stride 2", "roll by 1", "cumsum")


def lines_of(results):
    """The lines that were grouped."""
    return [
        {
            "name": name,
            "split": split,
            "scaling": scaling,
            "rows": 0,
            "devices": devices,
            **{key: one[key][at] for way in WAYS for key in (way, f"{way}_paper")},
        }
        for name, splits in results.items()
        for split, scalings in splits.items()
        for scaling, one in scalings.items()
        for at, devices in enumerate(one["devices"])
    ]


def test_programs_send_what_the_formulas_say(monkeypatch):
    """Or differ where it is said why, on 4 of the 8 devices and blocks of 6 rows."""
    monkeypatch.setattr(domain_scaling, "WEAK", 6)
    monkeypatch.setattr(domain_scaling, "STRONG", 24)
    cases = [case for case in CASES if case.name in QUICK]
    lines = domain_scaling.measured_here(4, cases)
    domain_scaling.check(lines, cases)
    assert len(cases) == len(QUICK) and {line["rows"] for line in lines} == {6}
    assert lines_of(domain_scaling.grouped(lines))[0] == lines[0] | {"rows": 0}
    shown = domain_scaling.table(lines)
    assert shown.row_count == len(lines)


def test_what_is_kept_holds_for_every_operator_up_to_512_devices():
    results = kept.saved("domain_scaling")
    assert list(results) == [case.name for case in CASES]
    domain_scaling.check(lines_of(results))
    for case in CASES:
        assert list(results[case.name]) == list(case.splits)
        for split, scalings in results[case.name].items():
            assert list(scalings) == ["weak", "strong"][: 1 + case.grows]
            most = case.most if split == "uneven" else 512
            told = [devices for devices in domain_scaling.EVERY if devices <= most]
            assert all(one["devices"] == told for one in scalings.values())


def test_the_docs_show_what_is_kept():
    results = kept.saved("domain_scaling")
    assert (DOCS / "scaling.svg").read_text() == figure.draw(results)
    assert report.markdown(results, CASES) in (DOCS / "domain.md").read_text()
    text = (DOCS / "domain.md").read_text()
    assert all(reason in text for case in CASES for reason in case.differs.values())


def test_a_difference_wants_a_reason_and_a_reason_a_difference():
    case = next(case for case in CASES if case.name == "roll by 1")
    told = dataclasses.replace(case, differs={("even", "backward"): "it is Monday"})
    line = {"name": case.name, "split": "even", "scaling": "weak", "devices": 4, "rows": 4}
    line |= {"forward": 256, "forward_paper": 128.0, "backward": 128, "backward_paper": 128.0}
    with pytest.raises(RuntimeError) as raised:
        domain_scaling.check([line], [told])
    assert str(raised.value).splitlines()[1:] == [
        "roll by 1, even, forward, 4 devices of 4 rows: 256 bytes, 128 on paper",
        "roll by 1, even, backward: as on paper, and a reason is given why not",
    ]
