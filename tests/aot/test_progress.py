"""What is known already: found again after an interruption."""

from tests.aot.artifacts import Artifact, Exported, keep
from tests.aot.progress import Progress


def test_the_last_line_of_a_key_holds(tmp_path):
    path = tmp_path / "deep" / "v5e.jsonl"
    progress = Progress(path)
    assert progress.found("add") is None
    progress.note("add", {"status": "crash"})
    progress.note("sin", {"status": "pass"})
    progress.note("add", {"status": "pass"})
    again = Progress(path)
    assert again.found("add") == {"status": "pass"}
    assert again.last == {"status": "pass"}


def test_a_line_that_was_cut_off_is_dropped(tmp_path):
    path = tmp_path / "v5e.jsonl"
    Progress(path).note("add", {"status": "pass"})
    path.write_text(path.read_text() + '["sin", {"sta')
    progress = Progress(path)
    assert progress.found("sin") is None
    progress.note("cos", {"status": "pass"})
    assert Progress(path).found("cos") == {"status": "pass"}
    assert Progress(path).found("add") == {"status": "pass"}


def test_the_same_program_is_one_file(tmp_path):
    first, second = keep(tmp_path, b"program", "tpu"), keep(tmp_path, b"program", "tpu")
    assert first == second
    assert keep(tmp_path, b"another", "tpu") != first
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".tpu", ".tpu"]


def test_what_was_exported_is_read_as_it_was(tmp_path):
    artifact = Artifact("family bert", ("step",), "tpu", "a.tpu", "", (("x", 2), ("y", 4)), (0, 3))
    exported = Exported(("step",), (), (artifact,))
    progress = Progress(tmp_path / "exports.jsonl")
    progress.note("bert", exported.as_json())
    kept = Progress(tmp_path / "exports.jsonl").found("bert")
    assert kept is not None
    assert Exported.of_json(kept) == exported
