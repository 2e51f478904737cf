"""A record: a unit runs again when a file of it changes, and stays away when another one does."""

import json

import pytest

from tools.tiers import choice, record, sources

HARNESS = ["tests/conformance/judge.py"]
FILES = {
    "torch_bridge/lowerings/elementwise.py": "from .tables import SINES\n",
    "torch_bridge/lowerings/tables.py": "SINES = 1\n",
    "torch_bridge/lowerings/matmul.py": "",
    "torch_bridge/engine/recording/tape.py": "from isoshard.torch_bridge.lowerings import matmul\n",
    "tests/conformance/judge.py": "",
}
RAN = {
    **{f"unit {number}": {"torch_bridge/engine/recording/tape.py"} for number in range(5)},
    "sin": {"torch_bridge/lowerings/elementwise.py", "torch_bridge/engine/recording/tape.py"},
    "mm": {"torch_bridge/lowerings/matmul.py", "torch_bridge/engine/recording/tape.py"},
}


@pytest.fixture
def root(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.fixture
def kept(root):
    path = root / "record.json"
    record.new(RAN, HARNESS, root).write(path)
    return path


def reached(kept, root) -> set[str]:
    known = record.read(kept, HARNESS, root)
    return set(choice.choose(RAN, known, one_in=2, seed="0").reached)


def test_nothing_changed_and_nothing_is_reached(kept, root):
    assert reached(kept, root) == set()


@pytest.mark.parametrize(
    ("changed", "runs"),
    [
        ("torch_bridge/lowerings/elementwise.py", {"sin"}),
        ("torch_bridge/lowerings/matmul.py", {"mm"}),
        ("torch_bridge/lowerings/tables.py", {"sin"}),  # which elementwise imports
        ("torch_bridge/engine/recording/tape.py", set()),  # common
        ("tests/conformance/judge.py", set(RAN)),
    ],
)
def test_a_changed_file_runs_its_units(kept, root, changed, runs):
    (root / changed).write_text(FILES[changed] + "# another\n")
    assert reached(kept, root) == runs


def test_a_common_file_runs_the_units_whose_own_it_is(root):
    tape = "torch_bridge/engine/recording/tape.py"
    made = record.new(RAN, HARNESS, root, own={"unit 3": [tape]})
    assert tape in made.common
    (root / tape).write_text("# another\n")
    assert [unit for unit in RAN if not made.unchanged(unit)] == ["unit 3"]


def test_a_file_that_goes_runs_its_units(kept, root):
    (root / "torch_bridge/lowerings/matmul.py").unlink()
    assert reached(kept, root) == {"mm"}


@pytest.mark.parametrize("name", ["python", *record.PACKAGES])
def test_another_version_runs_everything(kept, root, name, monkeypatch):
    others = {**record.versions(), name: "0.0"}
    monkeypatch.setattr(record, "versions", lambda: others)
    assert reached(kept, root) == set(RAN)


def test_without_a_record_everything_runs(root):
    assert reached(root / "none.json", root) == set(RAN)


def test_a_unit_without_a_record_runs(kept, root):
    known = record.read(kept, HARNESS, root)
    known.forget(["sin"])
    assert choice.choose([*RAN, "new"], known, one_in=2, seed="0").reached == ("sin", "new")


def test_what_passes_is_entered(kept, root):
    (root / "torch_bridge/lowerings/matmul.py").write_text("# another\n")
    known = record.read(kept, HARNESS, root)
    known.note({"mm": RAN["mm"]})
    known.write(kept)
    assert reached(kept, root) == set()


def test_units_of_the_same_files_share_a_line(kept):
    lines = [line for line in kept.read_text().splitlines() if '"units"' in line]
    assert len(lines) == 3
    groups = json.loads(kept.read_text())["groups"]
    assert [f"unit {number}" for number in range(5)] in [group["units"] for group in groups]


def test_the_sample_is_the_same_for_a_seed_and_another_for_another():
    units = [f"unit {number}" for number in range(60)]
    first = choice.drawn(units, seed="a", one_in=6)
    assert first == choice.drawn(reversed(units), seed="a", one_in=6)
    assert len(first) == 10
    drawn = [choice.drawn(units, seed=str(seed), one_in=6) for seed in range(60)]
    assert set().union(*drawn) == set(units)


def test_every_change_of_the_package_draws_another_sample(root):
    (root / "core").mkdir()
    before = choice.seed_of(root)
    (root / "core" / "mesh.py").write_text("")
    assert choice.seed_of(root) != before


def test_a_choice_says_what_it_leaves():
    made = choice.Choice(("a",), ("b", "c"), ("d",), "12ab")
    assert made.units == ("a", "b", "c")
    assert str(made) == (
        "3 of 4 run: 1 that have no record of these files, and a sample of 2 (seed 12ab)"
    )


def test_imports_are_followed_to_the_files():
    found = sources.imported("torch_bridge/lowerings/elementwise.py")
    assert {
        "torch_bridge/lowerings/registry.py",
        "torch_bridge/lowerings/argument_forms.py",
    } <= found
    assert "core/runtime/metrics.py" in sources.imported("torch_bridge/engine/compiling/program.py")
    assert "src/isoshard/__init__.py" in sources.imported("tests/conformance/layout.py")
    assert "tests/conformance/samples.py" in sources.imported("tests/conformance/layout.py")
