"""What `make test` leaves out, `make test-all` runs; and what a change reaches runs whole."""

import json
import os
import re
import subprocess
import types
from pathlib import Path

import pytest

from tools.tiers import record, sources, sweeps

ROOT = sources.ROOT
FILES = {
    "tests/torch_bridge/lowerings/test_pool.py": "@pytest.mark.sweep\ndef test_a(): ...\n",
    "tests/torch_bridge/lowerings/harness.py": "",
    "tests/torch_bridge/training/test_modules.py": "    @pytest.mark.long\n",
    "tests/core/layout/test_mesh.py": "@pytest.mark.sweep\n",
    "tests/core/layout/test_spec.py": "",
    "torch_bridge/lowerings/pool.py": "",
    "torch_bridge/lowerings/norm.py": "",
    "core/layout/mesh.py": "",
    "core/domain/windows/halo.py": "",
}
MARKED = [name for name, text in FILES.items() if "pytest.mark" in text]
POOL, MODULES, MESH = MARKED


@pytest.fixture
def root(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    sweeps.note(MARKED, tmp_path / "kept.json", tmp_path)
    return tmp_path


def changed(root):
    return sweeps.changed(MARKED, root / "kept.json", root)


@pytest.mark.parametrize(
    ("file", "whole"),
    [
        (POOL, {POOL}),
        ("tests/torch_bridge/lowerings/harness.py", {POOL}),
        ("torch_bridge/lowerings/pool.py", {POOL, MODULES}),
        ("torch_bridge/lowerings/norm.py", {MODULES}),
        ("core/layout/mesh.py", {MESH}),
        ("core/domain/windows/halo.py", set()),
        ("tests/core/layout/test_spec.py", set()),
    ],
)
def test_a_change_runs_the_files_that_are_about_it(root, file, whole):
    assert changed(root) == set()
    (root / file).write_text(FILES[file] + "# another\n")
    assert changed(root) == whole


def test_another_torch_runs_everything(root, monkeypatch):
    others = {**record.versions(), "torch": "0.0"}
    monkeypatch.setattr(record, "versions", lambda: others)
    assert changed(root) == set(MARKED)


def test_without_a_record_everything_runs(root):
    assert sweeps.changed(MARKED, root / "none.json", root) == set(MARKED)


def test_files_with_rooms_are_found(root):
    for name in ("test_house.py", "with_torch_xla/test_scripts.py"):
        (root / "tests" / name).parent.mkdir(exist_ok=True)
        (root / "tests" / name).write_text("")
    assert sweeps.test_files(root) == sorted([*MARKED, "tests/core/layout/test_spec.py"])


def test_what_passes_is_entered_beside_what_passed_before(root, monkeypatch):
    kept = root / "kept.json"
    before = json.loads(kept.read_text())["files"]
    spec = "tests/core/layout/test_spec.py"
    (root / POOL).unlink()
    sweeps.note([spec], kept, root)
    assert json.loads(kept.read_text())["files"].keys() == {*before, spec} - {POOL}
    others = {**record.versions(), "torch": "0.0"}
    monkeypatch.setattr(record, "versions", lambda: others)
    sweeps.note([spec], kept, root)
    assert json.loads(kept.read_text())["files"].keys() == {spec}


def test_a_page_runs_if_it_changed_since_it_passed(root, monkeypatch):
    kept, pages = root / "kept.json", ["README.md", "docs/a.md"]
    (root / "docs").mkdir()
    for page in pages:
        (root / page).write_text("")
    assert sweeps.changed_pages(pages, kept, root) == {*pages}
    sweeps.note([], kept, root, pages=pages)
    assert sweeps.changed_pages(pages, kept, root) == changed(root) == set()
    (root / "docs/a.md").write_text("another")
    sweeps.note([POOL], kept, root)
    assert sweeps.changed_pages(pages, kept, root) == {"docs/a.md"}
    monkeypatch.setattr(record, "versions", dict)
    assert sweeps.changed_pages(pages, kept, root) == {*pages}


@pytest.mark.parametrize(
    ("path", "folders", "runs"),
    [
        ("tests/core/test_a.py", ["tests"], True),
        ("tests/core/test_a.py", ["tests/core", "tests/cli"], True),
        ("tests/core/test_a.py", ["tests/core/test_a.py"], True),
        ("tests/core/test_a.py", ["tests/core/test_a.py::test_b", "tests/cor"], False),
        ("tests/multi_process/test_a.py", ["tests"], False),
        ("tests/multi_process/test_a.py", ["tests/multi_process"], True),
    ],
)
def test_a_run_notes_the_files_that_it_ran_whole(path, folders, runs):
    assert sweeps._ran(path, folders) == runs


def test_files_whose_rooms_changed_run_whole_unless_they_are_many():
    every = [f"tests/a/test_{number}.py" for number in range(40)]
    runs, whole = sweeps.drawn_files(every, {every[0], every[1]}, one_in=4, seed="1")
    assert whole == {every[0], every[1]} <= runs and len(runs) == 2 + 10
    again, none = sweeps.drawn_files(every, set(every[:6]), one_in=4, seed="1")
    assert none == set() and len(again) == 10
    runs, _ = sweeps.drawn_files([*every, "tests/b/c/test_d.py"], set(), one_in=4, seed="1")
    assert "tests/b/c/test_d.py" in runs and len(runs) == 11
    drawn = [sweeps.drawn_files(every, set(), one_in=4, seed=str(s))[0] for s in range(40)]
    assert set().union(*drawn) == set(every)


def test_a_file_that_is_not_drawn_is_not_collected_unless_it_is_named(monkeypatch):
    mine, other = (ROOT / "tests" / "tiers" / f"test_{name}.py" for name in ("sweeps", "rooms"))
    runs = {other.relative_to(ROOT).as_posix()}
    monkeypatch.setattr(sweeps, "_drawn", lambda tier: (runs, frozenset()))

    def ignored(path, tier="sample", *args):
        config = types.SimpleNamespace(getoption=lambda name: tier, args=args or ("tests",))
        return sweeps.pytest_ignore_collect(path, config)

    assert ignored(mine) and ignored(mine, "part")
    for path in (other, ROOT / "tests", ROOT / "tests" / "test_house.py"):
        assert ignored(path) is None
    assert ignored(mine, "all") is None and ignored(mine, "few") is None
    assert ignored(mine, "sample", f"{mine}::test_a") is None


def test_a_sweep_keeps_a_share_of_its_cases_and_always_one():
    cases = {f"a.py::test_many[{n}]": "sweep" for n in range(10)}
    few = {f"b.py::test_few[{n}]": "sweep" for n in range(3)}
    long = {f"c.py::test_{n}": "long" for n in range(10)}
    marked = {**cases, **few, **long}
    out = sweeps.left_out(marked, (), one_in=5, seed="1")
    assert [len(group.keys() - out) for group in (cases, few, long)] == [2, 1, 2]
    reached = sweeps.left_out(marked, {"a.py", "c.py"}, one_in=5, seed="1")
    assert reached < set(few)
    drawn = [marked.keys() - sweeps.left_out(marked, (), one_in=5, seed=str(s)) for s in range(80)]
    assert set().union(*drawn) == marked.keys()


class Item:
    def __init__(self, nodeid, mark=None):
        self.nodeid, self.mark = nodeid, mark

    def get_closest_marker(self, name):
        return self.mark if self.mark == name else None


def collected(tier, monkeypatch):
    """The tests that a tier runs, and those it says it leaves out."""
    whole = {"b.py"} if tier == "sample" else set()
    monkeypatch.setattr(sweeps, "_drawn", lambda tier: (set(), whole))
    items = [Item(f"a.py::test_one[{n}]", "sweep") for n in range(40)]
    items += [Item(f"b.py::test_two[{n}]", "sweep") for n in range(40)]
    items += [Item("a.py::test_three")]
    out: list[Item] = []
    hook = types.SimpleNamespace(pytest_deselected=lambda items: out.extend(items))
    config = types.SimpleNamespace(getoption=lambda name: tier, hook=hook)
    before = list(items)
    sweeps.pytest_collection_modifyitems(config, items)
    assert sorted(map(id, items + out)) == sorted(map(id, before))
    return [item.nodeid for item in items]


@pytest.mark.parametrize(
    ("tier", "first", "second"),
    [("all", 40, 40), ("note", 40, 40), ("sample", 5, 40), ("few", 1, 1)],
)
def test_each_tier_runs_its_share_and_every_unmarked_test(tier, first, second, monkeypatch):
    run = collected(tier, monkeypatch)
    counts = [
        sum(name.startswith(f"{file}::test_{which}[") for name in run)
        for file, which in (("a.py", "one"), ("b.py", "two"))
    ]
    assert counts == [first, second]
    assert "a.py::test_three" in run


def test_every_file_is_about_some_file_of_ours():
    for path in sweeps.test_files():
        about = [name for name in sweeps.rooms_of(path) if not name.startswith("tests/")]
        assert about, f"{path} has no room: add its folder to tools.tiers.sweeps._ABOUT"


def commands(target):
    """What make would run, whatever this run of it was given."""
    command = ["make", "--no-print-directory", "-n", target]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith("MAKE")},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


TYPED = (
    "tests/core tests/jax_bridge tests/onnx_bridge tests/torch_bridge/interop "
    "tests/torch_bridge/checkpoints tests/torch_bridge/models tests/torch_bridge/domain "
    "tests/torch_bridge/handlers tests/torch_bridge/spmd tests/torch_bridge/distributed "
    "tests/torch_bridge/dtensor"
)
"""What runs on meshes with Explicit axes as well."""


def test_test_all_leaves_nothing_out():
    """It runs pytest without a choice, and every step of .ci/run in full."""
    whole = commands("test-all")
    runs = re.findall(r"^(?:AXIS_TYPES=Explicit )?\S*/pytest (.*)$", whole, re.MULTILINE)
    assert runs == [
        "--sweeps note -n 2 --dist worksteal ",
        f"-n 2 --dist worksteal {TYPED}",
        "--sweeps note tests/multi_process",
    ]
    for step in (
        "-m examples.notebooks --all",
        "-m tests.conformance --write",
        "-m tests.fuzz",
        "-m benchmarks.environments torch-xla --test",
        "pytest tests/clusters",
        "ruff format --check",
        "pyright",
        "-m tools.site.browser",
    ):
        assert step in whole
    steps = re.findall(r"^make (\S+)", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    covered = {"test", "notebooks", "test-torchrun", "conformance", "fuzz", "docs-browser"}
    apart = {"test-newest", "device-check"}  # test-matrix, and a device, have more of them
    assert set(steps) == {*covered, *apart, "test-torch-xla-if-changed"}


def test_folders_that_pytest_does_not_enter_have_a_step_of_their_own():
    (line,) = re.findall(
        r"^norecursedirs = (.*?)    #", (ROOT / "pyproject.toml").read_text(), re.M
    )
    assert set(re.findall(r'"([a-z_]+)"', line)) == {
        "build",
        "clusters",
        "with_torch_xla",
        "multi_process",
    }
    assert Path(ROOT / "tests" / "with_torch_xla").is_dir()
