"""A whole run by a compiler that is none: what is tried again, kept, and written."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from tests.aot import __main__ as command
from tests.aot import aot_tables, compilers, outcome
from tests.aot.artifacts import Artifact, Exported, keep

FAKE = Path(__file__).with_name("fake_compiler.py")
DOES = {"forward": "pass", "float64": "refuse", "int64": "hang"}
"""Column -> what the compiler does with its program."""


class Exporter:
    """Stands for the processes that export."""

    def __init__(self):
        self.asked = []

    def __call__(self, tasks, start, *, jobs, limit, options):
        for task in tasks:
            self.asked.append(task)
            entry, columns = task
            does = [DOES[column] for column in columns if DOES[column] != "pass"]
            program = does[0] if does else "pass"
            name = keep(options["folder"], program.encode(), options["platform"])
            artifact = Artifact(entry, columns, options["platform"], name)
            host = columns if entry == "eig" else ()
            yield task, Exported(columns, host, (artifact,))


@pytest.fixture
def exporter(monkeypatch, tmp_path):
    found = Exporter()
    monkeypatch.setattr(command, "answers", found)
    monkeypatch.setattr(compilers, "SCRIPT", FAKE)
    monkeypatch.setattr(command, "entries", lambda: dict.fromkeys(["add", "eig"]))
    monkeypatch.setattr(command, "columns_of", lambda info, names: ["forward", "float64"])
    monkeypatch.setattr(command.steps, "names", list)
    monkeypatch.setattr(command.report, "rewrite", lambda expected: "the table")
    monkeypatch.setattr(outcome, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(outcome, "DOCUMENT", tmp_path / "page.md")
    text = f"# Before\n\n{aot_tables.BEGIN}\nold\n{aot_tables.END}\n\nAfter\n"
    outcome.DOCUMENT.write_text(text)
    return found


def _main(tmp_path, *more, target="v5e"):
    options = ["--folder", str(tmp_path / "kept"), "--python", sys.executable, "--limit", "5"]
    return command.main([*options, *(["--target", target] if target else []), *more])


def _words(target, entry):
    return json.loads(outcome.RESULTS.read_text())["targets"][target][entry]


def test_what_fails_together_is_tried_by_column(exporter, tmp_path, capsys):
    assert _main(tmp_path) == 0
    together, apart = ("forward", "float64"), [("forward",), ("float64",)]
    assert [columns for name, columns in exporter.asked if name == "add"] == [together, *apart]
    out = capsys.readouterr().out
    assert "| v5e | forward | 2 | 2 | 100.0% |" in out
    assert "| v5e | float64 | 2 | 0 | 0.0% |" in out
    assert "v5e: 2x refused: Refused: no: " in out


def test_what_is_noted_is_not_tried_again(exporter, tmp_path, monkeypatch, capsys):
    _main(tmp_path)
    exporter.asked = []
    capsys.readouterr()
    shutil.rmtree(tmp_path / "kept")  # as on another machine
    with monkeypatch.context() as nothing:
        nothing.setattr(compilers.Compiler, "_start", None)
        _main(tmp_path)
    assert exporter.asked == []
    assert "| v5e | float64 | 2 | 0 | 0.0% |" in capsys.readouterr().out
    _main(tmp_path, "--again")
    assert len(exporter.asked) == 6
    exporter.asked = []
    monkeypatch.setitem(DOES, "float64", "pass")
    _main(tmp_path, "--failed")
    assert [columns for _, columns in exporter.asked] == [("forward", "float64")] * 2
    assert _words("v5e", "add") == {"forward": "pass", "float64": "pass"}


def test_a_run_goes_on_where_another_was_interrupted(exporter, tmp_path, monkeypatch):
    _main(tmp_path, "--op", "add")
    assert not outcome.RESULTS.exists()
    exporter.asked = []
    _main(tmp_path)
    assert {name for name, _ in exporter.asked} == {"eig"}
    found = json.loads(outcome.RESULTS.read_text())
    del found["targets"]["v5e"]["add"]
    outcome.RESULTS.write_text(json.dumps(found))
    exporter.asked = []
    shutil.rmtree(tmp_path / "kept")
    _main(tmp_path)
    assert {name for name, _ in exporter.asked} == {"add"}
    assert set(json.loads(outcome.RESULTS.read_text())["targets"]["v5e"]) == {"add", "eig"}


def test_results_of_other_versions_do_not_count(exporter, tmp_path, monkeypatch):
    _main(tmp_path)
    _main(tmp_path, target="h100")
    monkeypatch.setattr(command, "packages_of", lambda python: {"fake": "2.0"})
    assert outcome.kept("v5e", {"fake": "2.0"}) == {}
    with monkeypatch.context() as nothing:
        nothing.setattr(compilers.Compiler, "_start", None)
        with pytest.raises(TypeError):  # programs whose outcomes are known are compiled once more
            _main(tmp_path)
    found = json.loads(outcome.RESULTS.read_text())
    outcome.RESULTS.write_text(json.dumps(found | {"versions": {"torch": "1.0"}}))
    assert outcome.kept("v5e", {}) == {}
    outcome.note("v5e", {}, {})
    assert "h100" not in json.loads(outcome.RESULTS.read_text())["targets"]


def test_known_tells_what_there_is(exporter, tmp_path, capsys):
    _main(tmp_path, "--op", "add")
    exporter.asked = []
    capsys.readouterr()
    _main(tmp_path, "--known")
    assert exporter.asked == []
    assert "| v5e | float64 | 1 | 0 | 0.0% |" in capsys.readouterr().out
    assert set(json.loads(outcome.RESULTS.read_text())["targets"]["v5e"]) == {"add"}


def test_a_whole_run_is_written(exporter, tmp_path):
    assert _main(tmp_path, target=None) == 0
    found = json.loads(outcome.RESULTS.read_text())
    assert list(found["targets"]) == ["v5e", "h100"]
    assert found["targets"]["h100"]["add"] == {"forward": "pass", "float64": "refused: Refused: no"}
    assert _words("v5e", "eig")["forward"] == "host"
    assert found["compilers"]["v5e"] == {"fake": "1.0"}
    text = outcome.DOCUMENT.read_text()
    assert "old" not in text
    assert text.startswith("# Before")
    assert text.endswith("After\n")
    assert "| h100 | float64 | 2 | 0 | 0.0% |" in text


def test_steps_have_a_table_of_their_own():
    cells = {
        "family bert": {"step": "pass"},
        "style fsdp": {"step": "refused: no"},
        "add": {"forward": "pass"},
    }
    text = aot_tables.part({"targets": {"v5e": cells}})
    assert "| family bert | yes |" in text
    assert "| style fsdp | no (c1) |" in text
    assert "| add |" not in text
    assert "- c1: refused: no" in text
