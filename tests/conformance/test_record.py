"""Which entries run after a change: those whose files changed, and a sample."""

import pytest

from tests.checkout import of_this_checkout
from tests.conformance import __main__ as command
from tests.conformance.pool import Task, run_all
from tests.conformance.worker import start, traced

RAN = {
    "sin": {"torch_bridge/lowerings/elementwise.py", "torch_bridge/engine/recording/tape.py"},
    **{f"entry {number}": {"torch_bridge/engine/recording/tape.py"} for number in range(11)},
}
CELLS = {name: ["forward", "backward"] for name in RAN}


@pytest.fixture
def noted(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "RECORD", tmp_path / "record.json")
    command.note(RAN, [], own={}, whole=True)


def test_a_sample_runs_where_nothing_changed(noted, capsys):
    assert len(command._chosen(CELLS)) == 1
    out = capsys.readouterr().out
    assert "1 of 12 run: 0 that have no record of these files, and a sample of 1 (seed " in out


def test_an_entry_that_failed_runs_again(noted):
    command.note({}, ["sin"], own={}, whole=False)
    assert next(iter(command._chosen(CELLS))) == "sin"
    command.note({"sin": RAN["sin"]}, [], own={}, whole=False)
    assert len(command._chosen(CELLS)) == 1


def test_without_a_record_every_entry_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "RECORD", tmp_path / "none.json")
    assert command._chosen(CELLS) == CELLS


def test_some_of_the_cells_run_where_everything_changed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "RECORD", tmp_path / "none.json")
    many = {f"entry {number}": ["forward", "backward"] for number in range(5 * command.MANY)}
    found = command._chosen(many)
    assert sum(map(len, found.values())) == 2 * command.MANY
    cells = f"{2 * command.MANY} of their {10 * command.MANY} cells run"
    assert cells in capsys.readouterr().out


def test_what_decides_is_the_harness():
    assert {"tests/conformance/compare.py", "tests/conformance/expected.py"} <= set(
        command.harness()
    )
    assert "tests/conformance/report.py" not in command.harness()
    assert not [path for path in command.harness() if "test_" in path]


@pytest.mark.long
@of_this_checkout
def test_an_entry_depends_on_the_file_that_registers_its_lowering(tmp_path):
    """`sin` is a row of a table: no line of that file runs."""
    options = {"limit": 1, "trace": tmp_path}
    task = Task("sin", ("forward",))
    cells = run_all([task], start, jobs=1, limit=240, options=options)
    assert cells["sin"]["forward"].status == "pass"
    files = traced(tmp_path)["sin"]
    assert {
        "torch_bridge/lowerings/elementwise.py",
        "torch_bridge/engine/operators/dispatch.py",
    } <= files
    assert traced(tmp_path, "own")["sin"] == {"torch_bridge/lowerings/elementwise.py"}
    assert not files & {"torch_bridge/lowerings/pool.py", "torch_bridge/lowerings/conv.py"}


def test_a_note_is_for_whole_entries(capsys):
    with pytest.raises(SystemExit):
        command.main(["--note", "--samples", "2"])
    assert "--note is for a whole run: leave out --op" in capsys.readouterr().err
