"""Reports as JSON come back equal, and other files raise."""

import dataclasses
import json
import math

import numpy as np
import pytest

from isoshard.planner.reports.report import Report
from tests.planner.reports.sample_reports import fitting, too_large


@pytest.mark.parametrize("report", [fitting(), too_large()], ids=["fits", "too large"])
def test_a_report_comes_back_equal(report):
    text = report.to_json()
    again = Report.from_json(text)
    assert again == report
    assert again.to_json() == text
    assert isinstance(again.collectives[0].axes, tuple)
    assert json.loads(text)["isoshard_report"] == 1


def test_floats_are_exact_and_scalars_of_numpy_are_numbers():
    report = fitting(flops=np.float64(0.1) + 0.2, seconds_taken=1 / 3, bytes_moved=float("inf"))
    again = Report.from_json(report.to_json())
    assert (again.flops, again.seconds_taken, again.bytes_moved) == (0.1 + 0.2, 1 / 3, math.inf)
    memory = dataclasses.replace(fitting().memory, peak=np.int64(5))
    assert Report.from_json(fitting(memory=memory).to_json()).memory.peak == 5
    assert math.isnan(Report.from_json(fitting(flops=math.nan).to_json()).flops)
    assert Report.from_json(changed(inputs=None)).inputs == ()  # before inputs were noted


def changed(**changes):
    content = json.loads(fitting().to_json())
    content.update(changes)
    return json.dumps({key: value for key, value in content.items() if value is not None})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "this is no report: no JSON, Expecting property name"),
        ("[1]", "this is no report: it has no 'isoshard_report' with a version"),
        ("{}", "this is no report: it has no 'isoshard_report' with a version"),
        (
            changed(isoshard_report=99),
            "the report is of version 99, and this isoshard reads version 1; make it again",
        ),
        (changed(memory=None, time=None), "report lacks memory, time: the file is not one"),
        (changed(colour="red"), "report has unknown colour: the file is not one"),
        (changed(depth="deep"), "report.depth is 'deep', and can be 'trace', 'partition', 'comp"),
        (changed(mesh={"x": "2"}), r"report.mesh\['x'\] is '2', and should be of type int"),
        (changed(advice=[1]), r"report.advice\[0\] is 1, and should be of type str"),
        (changed(flops=[]), r"report.flops is \[\], and should be of type float"),
    ],
)
def test_other_files_raise(text, message):
    with pytest.raises(ValueError, match=message):
        Report.from_json(text)
