"""Parts run in processes with time limits; a failure is recorded and ends nothing else."""

from __future__ import annotations

import doctest
import json
import time

import pytest

from tools.device_check import operators, part, report, running, sections
from tools.device_check.running import Options
from tools.device_check.sections import SECTIONS, Section

OPTIONS = Options("gpu", "NVIDIA H100 80GB HBM3")


def section(name="first", **changes):
    return Section(
        name,
        {"gpu": 60, "cpu": 60},
        lambda results: [
            failure for result in results.values() for failure in result.get("failures", ())
        ],
        lambda results: f"{len(results)} parts",
        **changes,
    )


def run(selected, outcomes, **changes):
    """Run sections whose parts have these outcomes, or raise them; and the calls that were made."""
    calls = []

    def call(function, name, part, options, path, *, variables, limit):
        calls.append((name, part, options, variables, limit))
        outcome = outcomes[part]
        if isinstance(outcome, Exception):
            part_file = running.Path(path)
            part_file.write_text(json.dumps({"failures": [], "partial": 1}))
            raise outcome
        return outcome

    arguments = {"limit": 480, "call": call} | changes
    return running.run(selected, OPTIONS, **arguments), calls


GOOD = {"results": {"failures": []}}
ERROR = {"results": {}, "error": {"type": "ValueError", "message": "no", "frames": []}}


@pytest.mark.parametrize("module", [part, sections, operators], ids=lambda module: module.__name__)
def test_examples(module):
    result = doctest.testmod(module)
    assert result.attempted and not result.failed


def test_parts_of_a_good_section():
    records, calls = run([section(parts=("a", "b"), variables={"X": "1"})], {"a": GOOD, "b": GOOD})
    record = records["first"]
    assert (record["status"], record["failures"], record["summary"]) == ("ok", [], "2 parts")
    assert sorted((name, part) for name, part, *_ in calls) == [("first", "a"), ("first", "b")]
    _, _, options, variables, limit = calls[0]
    assert options["kind"] == OPTIONS.kind and options["seconds"] == limit == 60
    assert variables == {**running.VARIABLES, "X": "1"}


def test_the_cpu_hides_the_gpu():
    variables_of_part = {}

    def call(*arguments, variables, limit):
        variables_of_part.update(variables)
        return GOOD

    flagged = section(variables={"XLA_FLAGS": "--more"})
    running.run([flagged], Options("cpu"), limit=480, call=call)
    assert (variables_of_part["JAX_PLATFORMS"], variables_of_part["CUDA_VISIBLE_DEVICES"]) == (
        "cpu",
        "",
    )
    assert variables_of_part["XLA_FLAGS"].startswith("--more")


def test_a_failure_is_recorded_and_the_others_run():
    crash = running.calls.Failed("ended with status -11")
    outcomes = {"a": ERROR, "b": crash, "last": {"results": {"failures": ["3 is not 4"]}}}
    records, calls = run([section(parts=("a", "b")), section("last")], outcomes)
    assert len(calls) == 3
    assert records["first"]["status"] == records["last"]["status"] == "failed"
    assert records["first"]["failures"][:2] == [
        "a: ValueError: no",
        "b: Failed: ended with status -11",
    ]
    assert records["last"]["failures"] == ["3 is not 4"]
    assert records["first"]["parts"]["b"]["results"] == {"failures": [], "partial": 1}


def test_an_optional_part_may_fail():
    outcomes = {"a": GOOD, "b": {**ERROR, "results": {"failures": []}}}
    records, _ = run([section(parts=("a", "b"), optional=("b",))], outcomes)
    assert records["first"]["status"] == "ok"
    assert records["first"]["parts"]["b"]["status"] == "failed"


def test_time_that_is_over_is_recorded():
    now = [0.0]

    def call(function, name, part, options, path, *, variables, limit):
        now[0] += limit
        return GOOD

    records = running.run(
        [section(timed=True), section("second", timed=True), section("third", timed=True)],
        OPTIONS,
        limit=100,
        clock=lambda: now[0],
        call=call,
    )
    assert [record["status"] for record in records.values()] == ["ok", "ok", "not run"]
    assert now[0] == 100  # the second had the 40 s that were left
    assert records["third"]["summary"] == "not run, no time left: third."


def test_parts_see_the_results_of_earlier_sections():
    later = section("later", more_options=lambda device, parts: {"measured": parts["first"]})
    _, calls = run([section(timed=True), later], {"first": GOOD, "later": GOOD})
    assert calls[1][2]["measured"]["first"]["results"] == GOOD["results"]


def test_timed_parts_run_one_at_a_time():
    running_now, most = [0], {}

    def call(function, name, *arguments, variables, limit):
        running_now[0] += 1
        most[name] = max(most.get(name, 0), running_now[0])
        time.sleep(0.1)
        running_now[0] -= 1
        return GOOD

    selected = [section("timed", parts=("a", "b"), timed=True), section("other", parts=("c", "d"))]
    running.run(selected, OPTIONS, limit=480, call=call)
    assert most == {"timed": 1, "other": 2}


def test_a_real_process_that_raises_and_one_that_hangs(tmp_path):
    """By the section `environment`, whose options are wrong, and by a limit that is too short."""
    missing = section("no_such_module")
    record = running.run_part(missing, "a", {"device": "cpu", "seconds": 60})
    assert record["status"] == "failed"
    assert record["error"]["type"] == "ModuleNotFoundError"
    assert any("import_module" in frame for frame in record["error"]["frames"])
    hangs = running.run_part(section("environment"), "a", {"device": "cpu", "seconds": 0.2})
    assert hangs["error"]["message"] == "took more than 0 s"


def test_sections_name_their_modules():
    folder = running.Path(part.__file__).parent
    assert all((folder / f"{name}.py").is_file() for name in SECTIONS)
    assert sum(min(one.limits["gpu"], 480) for one in SECTIONS.values()) > 0
    assert set(report.TITLES) == set(sections.MODELS)
    assert set(report.CONTESTANTS) == set(SECTIONS["training"].parts)
