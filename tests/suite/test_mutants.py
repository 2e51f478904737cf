"""Which mutants there are, and which tests each is given (tools/suite/mutants.py)."""

import types

import pytest

from tools.suite import mutants


def test_every_kept_mutant_is_of_the_heart():
    heart, kept = set(mutants.modules()), mutants.kept()
    assert len(kept) == mutants.NUMBER
    files = {mutant["file"] for mutant in kept}
    assert {file for file in files if (mutants.ROOT / file).exists()} <= heart
    assert any(name.startswith("core/blocks/") for name in heart)
    assert not any(name.startswith("planner/") for name in heart)


def test_the_kept_mutants_are_changes_of_the_package():
    sources = {}
    gone = []
    for mutant in mutants.kept():
        path = mutants.ROOT / mutant["file"]
        source = sources.setdefault(path, path.read_text() if path.exists() else "")
        if mutants.site_of(mutant, source) is None:
            gone.append((mutant["file"], mutant["function"]))
    assert len(gone) <= 30, gone  # one in ten: draw again before the shares say nothing


def test_probes_tell_the_tests_that_come_by(tmp_path):
    report = tmp_path / "probe.tsv"
    report.write_text("3\ta.py::test[x y] (call)\n3\tb.py::test (setup)\n4\t\n")
    assert mutants.visits(report) == {3: {"a.py::test[x y]", "b.py", "b.py::test"}, 4: {""}}


def test_all_tests_of_a_file_may_share_what_its_fixtures_made():
    tests = ["a.py::one", "b.py::two", "b.py::three[x]"]
    assert mutants.of_files({"a.py::one", "b.py"}, tests) == tests[1:]
    assert mutants.of_files({"a.py::one"}, tests) == []


def test_the_shortest_tests_come_first_until_the_time_is_over():
    most = mutants.MOST_SECONDS
    seconds = {"a": most / 2, "b": most / 4, "c": most / 2, "d": 2 * most}
    assert mutants.chosen("abcd", seconds) == ["b", "a"]
    assert mutants.chosen("d", seconds) == ["d"]
    assert mutants.chosen("", seconds) == []


def test_each_function_has_a_turn_before_another_has_two():
    seconds = {"f[1]": 1, "f[2]": 2, "g": 3, "h[1]": 4}
    assert mutants.chosen(seconds, seconds) == ["f[1]", "g", "h[1]", "f[2]"]


def test_what_survives_meets_the_tests_of_the_nearest_folder():
    tests = ["tests/a/b/test_x.py::one", "tests/a/test_y.py::two", "tests/test_z.py::three"]
    assert mutants.of_folder("a/b/m.py", tests) == tests[:1]
    assert mutants.of_folder("a/c/d/m.py", tests) == tests[:2]
    assert mutants.of_folder("c/m.py", tests) == []


@pytest.mark.parametrize(
    ("fails", "killer"),
    [
        (lambda tests, mutated: mutated and "b" in tests and "b", "b"),
        (lambda tests, mutated: len(tests) > 1 and "a" in tests and "a", ""),  # only among others
        (lambda tests, mutated: "a" in tests and "a", ""),  # on the package as it is, too
        (lambda tests, mutated: mutated and "pytest ended with 4", "pytest ended with 4"),
    ],
)
def test_what_kills_a_mutant_fails_alone_on_it_and_not_on_the_package(fails, killer, monkeypatch):
    mutant = mutants.kept()[0]
    package = (mutants.ROOT / mutant["file"]).read_text()
    sources = [package]
    monkeypatch.setattr(mutants, "wheel", lambda _, edits: sources.append(edits[0][1]))
    monkeypatch.setattr(
        mutants, "failed", lambda tests, _: fails(tests, sources[-1] != package) or ""
    )
    runs = types.SimpleNamespace(package=None)
    assert mutants.kill(mutant, ["a", "b", "c"], runs) == killer
    assert sources[-1] == package and len(sources) > 2


def test_the_table_has_shares_and_survivors():
    mutant = {"file": "core/a.py", "function": "f", "old": "a < b", "new": "a <= b"}
    killed = {"killed": True, "by": "t", "tests": 1, "visits": 1}
    survived = {"killed": False, "by": "", "tests": 0, "visits": 0}
    rows = mutants.table([mutant | {"before": killed}, mutant | {"before": survived}])
    assert "| before | 2 | 1 | 1 | 50.0% |" in rows
    assert "| core/a.py | f | `a <= b` | `a < b` | 0 |" in rows
