"""A step with rooms runs when they change; each notebook has some, and each room is there."""

import pytest

from examples.notebooks.__main__ import FOLDER
from tools.tiers import record, rooms


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(rooms, "ROOMS", {"step": ("folder", "file.py"), "other": ("file.py",)})
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.py").write_text("")
    (tmp_path / "file.py").write_text("")
    (tmp_path / "elsewhere.py").write_text("")
    return tmp_path


def test_a_step_is_unchanged_until_a_room_of_it_changes(root):
    kept = root / "rooms.json"
    assert not rooms.unchanged("step", kept, root)
    rooms.note("step", kept, root)
    rooms.note("other", kept, root)
    (root / "elsewhere.py").write_text("# another")
    assert rooms.unchanged("step", kept, root)
    (root / "folder" / "b.py").write_text("")
    assert not rooms.unchanged("step", kept, root)
    assert rooms.unchanged("other", kept, root)


def test_another_torch_runs_a_step(root, monkeypatch):
    kept = root / "rooms.json"
    rooms.note("step", kept, root)
    others = {**record.versions(), "torch": "0.0"}
    monkeypatch.setattr(record, "versions", lambda: others)
    assert not rooms.unchanged("step", kept, root)


def test_a_room_that_is_gone_is_named(root):
    (root / "file.py").unlink()
    with pytest.raises(FileNotFoundError, match=r"file\.py, a room of step, is not there"):
        rooms.state("step", root)


def test_every_room_is_there_and_every_notebook_has_some():
    for step in rooms.ROOMS:
        assert rooms.state(step)
    notebooks = {f"notebook {path.stem}" for path in FOLDER.glob("*.ipynb")}
    assert notebooks == {step for step in rooms.ROOMS if step.startswith("notebook ")}


def test_the_command_answers_by_its_exit_code(root, monkeypatch, capsys):
    monkeypatch.setattr(rooms, "unchanged", lambda step: step == "step")
    assert rooms.main(["step"]) == 0
    assert "step: passed with folder, file.py as they are" in capsys.readouterr().out
    assert rooms.main(["other"]) == 1
    assert "other: runs, as one of file.py has changed" in capsys.readouterr().out
