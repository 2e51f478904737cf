"""A benchmark's command: rounds, what `--quick` changes, and what is kept."""

import doctest
import json

import pytest

from tools.harness import command, results, tables, timing
from tools.harness.command import Benchmark


@pytest.mark.parametrize("module", [tables, timing], ids=lambda module: module.__name__)
def test_examples(module):
    result = doctest.testmod(module)
    assert result.attempted and not result.failed


@pytest.mark.parametrize(
    ("words", "rounds", "workloads"),
    [
        ([], 60, ["a", "b"]),
        (["--quick"], 5, ["a", "b"]),
        (["b", "--quick", "--rounds", "7"], 7, ["b"]),
    ],
)
def test_rounds_and_workloads(words, rounds, workloads):
    benchmark = Benchmark("x", "About.", rounds=60, quick=5)
    benchmark.add_workloads(["a", "b"])
    given = benchmark.parse(words)
    assert (given.rounds, given.workloads) == (rounds, workloads)


def test_an_unknown_workload_is_named(capsys):
    benchmark = Benchmark("x", None)
    benchmark.add_workloads(["a", "b"])
    with pytest.raises(SystemExit):
        benchmark.parse(["c"])
    assert "no workload c; there are a, b" in capsys.readouterr().err


def test_results_are_kept_unless_it_is_quick(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    for words, found in ((["--quick"], {"a": 0}), ([], {"a": 1}), ([], {"b": 2})):
        benchmark = Benchmark("x", None, quick=1)
        benchmark.parse(words)
        benchmark.finish(found, "a line", merge=True)
        assert "a line" in capsys.readouterr().out
    kept = json.loads((tmp_path / "x.json").read_text())
    assert kept["results"] == results.saved("x") == {"a": 1, "b": 2}
    assert {"command", "date", "machine", "versions"} <= set(kept)


def test_the_command_is_that_of_the_module_that_runs(monkeypatch):
    main = type(command)("__main__")
    main.__spec__ = type("Spec", (), {"name": "tests.conformance.__main__"})()
    monkeypatch.setitem(results.sys.modules, "__main__", main)
    assert results.command(["--op", "a b"]) == "python -m tests.conformance --op 'a b'"
    assert results.command([]) == "python -m tests.conformance"


def test_what_a_function_returns_is_settled_outside_of_the_time():
    settled = []
    times = timing.interleave(
        {"a": lambda: 1, "b": lambda: 2}, rounds=2, warmup=1, settle=settled.append
    )
    assert [len(taken) for taken in times.values()] == [2, 2]
    assert settled == [1, 2, 1, 2, 2, 1]


def test_memory_is_read_and_an_unknown_line_is_named():
    assert timing.resident("VmHWM") >= timing.resident("VmRSS") > 1e7
    with pytest.raises(RuntimeError, match="has no VmNone"):
        timing.resident("VmNone")
