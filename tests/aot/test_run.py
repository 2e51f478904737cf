"""A whole run by a compiler that is none: what is tried again, kept, and written."""

import json
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
def exporter(monkeypatch):
    found = Exporter()
    monkeypatch.setattr(command, "answers", found)
    monkeypatch.setattr(compilers, "SCRIPT", FAKE)
    monkeypatch.setattr(command, "entries", lambda: dict.fromkeys(["add", "eig"]))
    monkeypatch.setattr(command, "columns_of", lambda info, names: ["forward", "float64"])
    monkeypatch.setattr(command.steps, "names", list)
    return found


def _main(tmp_path, *more):
    options = ["--folder", str(tmp_path), "--python", sys.executable, "--limit", "5"]
    return command.main([*options, "--target", "v5e", *more])


def test_what_fails_together_is_tried_by_column(exporter, tmp_path, capsys):
    assert _main(tmp_path) == 0
    together, apart = ("forward", "float64"), [("forward",), ("float64",)]
    assert [columns for name, columns in exporter.asked if name == "add"] == [together, *apart]
    out = capsys.readouterr().out
    assert "| v5e | forward | 2 | 2 | 100.0% |" in out
    assert "| v5e | float64 | 2 | 0 | 0.0% |" in out
    assert "v5e: 2x refused: Refused: no: " in out


def test_a_second_run_starts_nothing(exporter, tmp_path, monkeypatch, capsys):
    _main(tmp_path)
    first, exporter.asked = capsys.readouterr().out, []
    with monkeypatch.context() as nothing:
        nothing.setattr(compilers.Compiler, "_start", None)
        _main(tmp_path)
    assert exporter.asked == []
    assert first.partition("\n\n")[2].partition("\n\n")[0] in capsys.readouterr().out
    _main(tmp_path, "--again")
    assert len(exporter.asked) == 6
    exporter.asked = []
    monkeypatch.setitem(DOES, "float64", "pass")
    _main(tmp_path, "--failed")
    assert [columns for _, columns in exporter.asked] == [("forward", "float64")] * 2


def test_known_tells_what_there_is(exporter, tmp_path, capsys):
    _main(tmp_path, "--op", "add")
    exporter.asked = []
    capsys.readouterr()
    _main(tmp_path, "--known")
    assert exporter.asked == []
    assert "| v5e | float64 | 1 | 0 | 0.0% |" in capsys.readouterr().out


def test_a_whole_run_is_written(exporter, tmp_path, monkeypatch, capsys):
    results, page = tmp_path / "results.json", tmp_path / "aot.md"
    page.write_text(f"# Before\n\n{aot_tables.BEGIN}\nold\n{aot_tables.END}\n\nAfter\n")
    monkeypatch.setattr(outcome, "RESULTS", results)
    monkeypatch.setattr(outcome, "DOCUMENT", page)
    monkeypatch.setattr(command.report, "rewrite", lambda expected: "the table")
    options = ["--folder", str(tmp_path / "known"), "--python", sys.executable]
    assert command.main(options) == 0
    found = json.loads(results.read_text())
    assert list(found["targets"]) == ["v5e", "h100"]
    assert found["targets"]["h100"]["add"] == {"forward": "pass", "float64": "refused: Refused: no"}
    assert found["targets"]["v5e"]["eig"]["forward"] == "host"
    assert found["compilers"]["v5e"] == {"fake": "1.0"}
    text = page.read_text()
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
