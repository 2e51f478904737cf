"""Pairs of versions: their environments, what their tests came to, and the table of the docs."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

from tools.versions import environments, matrix, pairs
from tools.versions.pairs import PAIRS, ROOT

REPORT = """<testsuites><testsuite>
<testcase classname="tests.core.test_a" name="test_it"/>
<testcase classname="tests.core.test_a" name="test_that[x]"><failure message="no"/></testcase>
<testcase classname="tests.core.test_a" name="test_made"><error message="no"/></testcase>
<testcase classname="tests.core.test_a" name="test_left"><skipped type="pytest.skip"/></testcase>
<testcase classname="tests.core.test_a" name="test_known"><skipped type="pytest.xfail"/></testcase>
</testsuite></testsuites>"""
COUNTS = {
    "passed": 1,
    "xfailed": 1,
    "skipped": 1,
    "failed": 2,
    "failures": ["tests.core.test_a::test_made", "tests.core.test_a::test_that[x]"],
}


@pytest.fixture
def kept(tmp_path, monkeypatch):
    monkeypatch.setattr(matrix, "KEPT", tmp_path / "results.json")


def test_outcomes_are_counted_and_failures_named(tmp_path):
    (tmp_path / "report.xml").write_text(REPORT)
    assert matrix.counted(matrix.outcomes(tmp_path / "report.xml")) == COUNTS


def test_failed_tests_that_run_again_count_as_what_they_come_to():
    made, that, gone = "tests.core.test_a::test_made", "tests.core.test_a::test_that[x]", "b::gone"
    assert matrix.files_of([made, that, "tests.core.test_b.TestIt::test_x"]) == [
        "tests/core/test_a.py",
        "tests/core/test_b.py",
    ]
    before = {**COUNTS, "failed": 3, "passed": 7, "failures": [made, that, gone]}
    found = {made: "passed", that: "failed", "tests.core.test_a::test_it": "failed"}
    assert matrix.mended(before, found) == {
        "passed": 7,  # one more, and one less
        "xfailed": 1,
        "skipped": 1,
        "failed": 2,
        "failures": ["tests.core.test_a::test_it", that],
    }


def test_a_file_that_could_not_be_imported_runs_again_and_all_its_tests_count():
    broken = "::tests.core.test_a"
    assert matrix.files_of([broken]) == ["tests/core/test_a.py"]
    before = {**COUNTS, "failed": 1, "passed": 7, "failures": [broken]}
    found = {"tests.core.test_a::test_it": "passed", "tests.core.test_a.TestIt::test_x": "failed"}
    after = matrix.mended(before, found)
    assert (after["passed"], after["failed"]) == (8, 1)
    assert after["failures"] == ["tests.core.test_a.TestIt::test_x"]
    assert matrix.mended(before, {broken: "failed"}) == before


@pytest.mark.usefixtures("kept")
def test_a_part_replaces_what_it_came_to_before():
    matrix.keep("oldest", "tests/core", {**COUNTS, "date": "2026-01-01", "commit": "a"})
    later = {**COUNTS, "passed": 1200, "failed": 0, "failures": [], "commit": "b"}
    matrix.keep("oldest", "tests/core", {**later, "date": "2026-01-03"})
    matrix.keep("oldest", "tests/cli", {**later, "date": "2026-01-02"})
    [row] = [line for line in matrix.table().splitlines() if "| 0.9.0 |" in line]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[4:] == ["tests/cli, tests/core", "2,400", "2", "0", "2026-01-02 to 2026-01-03"]
    matrix.keep("oldest", "tests/cli", {**COUNTS, "date": "2026-01-04", "commit": "c"})
    for part in matrix.parts("oldest"):
        matrix.keep("oldest", part, {**COUNTS, "date": "2026-01-04", "commit": "c"})
    assert "| core and bridges |" in matrix.table()
    [_, _, first, *_] = matrix.failures().splitlines()
    assert first == "| `tests.core.test_a::test_made` | 3.11, JAX 0.9.0, torch 2.10.0 |"


def test_every_test_is_in_a_part():
    parts = matrix.parts("newest")
    assert not [part for part in parts if not list(ROOT.glob(part))]
    folders = tuple(f"{part}/" for part in parts if "*" not in part)
    apart = tuple(f"tests/{name}/" for name in ("with_torch_xla", "multi_process", "clusters"))
    patterns = [part for part in parts if "*" in part]
    left = [
        path
        for path in (str(found.relative_to(ROOT)) for found in ROOT.glob("tests/**/test_*.py"))
        if not path.startswith((*folders, *apart))
        and not any(Path(path).match(pattern) for pattern in patterns)
    ]
    assert not left


@pytest.mark.usefixtures("kept")
def test_a_pair_that_did_not_run_says_so():
    assert matrix.table().count("not run") == len(PAIRS)


def test_the_page_has_the_table():
    page = (ROOT / "docs" / "compatibility.md").read_text()
    assert matrix.table() in page and matrix.failures() in page, "python -m tools.versions docs"


def test_pairs_are_within_the_bounds_of_the_package():
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["torch"]]
    bounds = {one.name: one.specifier for one in map(Requirement, wanted)}
    for pair in PAIRS.values():
        assert bounds["jax"].contains(pair.jax) and bounds["torch"].contains(pair.torch)
        assert f"Programming Language :: Python :: {pair.python}" in project["classifiers"]
    assert not bounds["jax"].contains("0.13.0")


@pytest.mark.parametrize("name", PAIRS)
def test_constraints_hold_the_pair(name):
    pair = PAIRS[name]
    lines = pair.constraints.read_text().splitlines()
    assert set(pair.requirements) <= set(lines)


def test_the_latest_pair_has_no_versions():
    latest = pairs.pair("latest")
    assert latest.requirements == ("jax", "jaxlib", "torch") and latest.constraints is None
    assert latest.python == ".".join(map(str, sys.version_info[:2]))


def test_an_environment_is_named_after_its_constraints(tmp_path, monkeypatch):
    monkeypatch.setenv("ISOSHARD_ENVIRONMENTS", str(tmp_path))
    before = environments.folder("oldest")
    assert before.parent == tmp_path and before.name.startswith("oldest-")
    changed = PAIRS["oldest"]._replace(torch="2.10.1")
    monkeypatch.setitem(PAIRS, "oldest", changed)
    assert environments.folder("oldest") != before


def _interpreter(path: Path, version: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho {version}\n")
    path.chmod(0o755)
    return str(path)


def test_an_interpreter_is_named_on_path_or_of_pyenv(tmp_path, monkeypatch):
    find = environments.interpreter.__wrapped__
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    with pytest.raises(environments.NoPython, match=r"no Python 3\.99 here.* PYTHON399=/path/to/"):
        find("3.99")
    of_pyenv = _interpreter(tmp_path / "pyenv/versions/3.99.1/bin/python3.99", "3.99")
    assert find("3.99") == Path(of_pyenv)
    _interpreter(tmp_path / "bin" / "python3.99", "no version: a shim of nothing")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    assert find("3.99") == Path(of_pyenv)
    named = _interpreter(tmp_path / "named", "3.99")
    monkeypatch.setenv("PYTHON399", named)
    assert find("3.99") == Path(named)
    version = ".".join(map(str, sys.version_info[:2]))
    monkeypatch.setenv(f"PYTHON{version.replace('.', '')}", sys.executable)
    assert find(version) == Path(sys.executable)
