"""The tests that `make test` runs a sample of: a plugin of pytest, which tests/conftest.py loads.

Two marks say that a test has a place in `make test-all`, and a share of `make test`:

- `sweep`: a function over a table of like cases. At least one case of it always runs.
- `long`: one check of several seconds, with shorter ones beside it.

`--sweeps all`, as pytest does by itself, runs every case. `--sweeps sample` runs whole the test
files whose rooms changed since all passed, and of the others one case in eight of each sweep, and
one long test in eight. `--sweeps few` runs one in forty, whatever changed; `--sweeps part` does so
in one test file of six. `--sweeps note` runs everything, and if that passes enters what the rooms
hold in `tests/sweeps.json`.

The rooms of `tests/A/B/test_x.py` are the folder `A/B` (of a test of lowerings: `x.py` there), what
`_ABOUT` adds, and the test with the helpers beside it.
"""

from __future__ import annotations

import collections
import functools
import json
import re
from collections.abc import Collection, Mapping, Set
from pathlib import Path

import pytest

from . import choice, record, sources

KEPT = sources.ROOT / "tests" / "sweeps.json"
ONE_IN = {"sample": 8, "few": 40, "part": 40}
FILES_ONE_IN = 6
MARKS = {
    "sweep": "a table of like cases; make test runs a sample, make test-all each",
    "long": "one check of several seconds; make test runs one in eight, make test-all each",
}
_LOWERINGS = "torch_bridge/lowerings"
_ABOUT = {
    "torch_bridge/training": (_LOWERINGS,),
    "torch_bridge/models": (_LOWERINGS,),
    "torch_bridge/autograd": (_LOWERINGS,),
    "torch_bridge/overrides": (_LOWERINGS,),
    "torch_bridge/domain": ("core/domain",),
    "torch_bridge/lowerings": (_LOWERINGS,),  # of tests that no lowering file has the name of
    "examples/domain": ("core/domain",),
    "cli": ("src/isoshard/cli",),
    "ecosystem": ("torch_bridge/trainers", "torch_bridge/overrides"),
    "jax_pages": ("torch_bridge/interop",),
    "torch_bridge/engine/capture/changes": ("torch_bridge/engine/capture", "torch_bridge/loops"),
}
_MARKED = re.compile(r"^ *@pytest\.mark\.(sweep|long)\b", re.MULTILINE)


def rooms_of(path: str, root: Path = sources.ROOT) -> list[str]:
    """The files that a test file is about, itself among them.

    >>> rooms_of("tests/torch_bridge/lowerings/test_pool.py")[-1]
    'torch_bridge/lowerings/pool.py'
    """
    test = Path(path)
    folder = test.parent.relative_to("tests").as_posix()
    own = f"{folder}/{test.name.removeprefix('test_')}"
    helpers = [p for p in (root / test.parent).glob("*.py") if not p.name.startswith("test_")]
    found = {path, *(helper.relative_to(root).as_posix() for helper in helpers)}
    if folder == _LOWERINGS and (root / own).is_file():
        return sorted({*found, own})
    if "/" in folder:
        found.update(sources.python_files([folder], root))
    else:
        found.update(p.relative_to(root).as_posix() for p in (root / folder).glob("*.py"))
    return sorted({*found, *sources.python_files(_ABOUT.get(folder, ()), root)})


def marked_files(root: Path = sources.ROOT) -> list[str]:
    """The test files with marked tests."""
    tests = (root / "tests").rglob("test_*.py")
    return sorted(p.relative_to(root).as_posix() for p in tests if _MARKED.search(p.read_text()))


def changed(paths: Collection[str], kept: Path = KEPT, root: Path = sources.ROOT) -> Set[str]:
    """The test files whose rooms are not as they were when all passed; all for other versions."""
    known = json.loads(kept.read_text()) if kept.is_file() else {}
    if known.get("versions") != record.versions():
        return set(paths)
    files = known["files"]
    return {path for path in paths if files.get(path) != _state(path, root)}


def note(paths: Collection[str], kept: Path = KEPT, root: Path = sources.ROOT) -> None:
    """Enter test files whose tests all pass."""
    files = {path: _state(path, root) for path in sorted(paths)}
    kept.write_text(json.dumps({"versions": record.versions(), "files": files}, indent=0) + "\n")


def _state(path: str, root: Path) -> str:
    return sources.digest(rooms_of(path, root), root)


def left_out(
    marked: Mapping[str, str], reached: Collection[str], *, one_in: int, seed: str
) -> Set[str]:
    """The tests that do not run.

    Args:
        marked: test -> `sweep` or `long`.
        reached: test files that run whole.
        one_in: of the other tests, the share that runs.
        seed: draws them.

    Returns:
        Names out of `marked`.
    """
    groups: dict[str, list[str]] = collections.defaultdict(list)
    for test, mark in marked.items():
        if test.partition("::")[0] not in reached:
            groups[test.partition("[")[0] if mark == "sweep" else mark].append(test)
    kept = (choice.drawn(tests, seed=seed, one_in=one_in) for tests in groups.values())
    return {test for tests in groups.values() for test in tests}.difference(*kept)


@functools.cache
def _reached() -> Set[str]:
    return changed(marked_files())


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option."""
    parser.addoption(
        "--sweeps",
        choices=["all", *ONE_IN, "note"],
        default="all",
        help="which cases of tests marked sweep or long: see tools/tiers/sweeps.py (all)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Name the marks."""
    for name, about in MARKS.items():
        config.addinivalue_line("markers", f"{name}: {about}")


def pytest_report_header(config: pytest.Config) -> list[str]:
    """What runs whole, and the seed of the rest."""
    tier = config.getoption("--sweeps")
    if tier not in ONE_IN:
        return []
    line = f"sweeps: one case in {ONE_IN[tier]} (seed {choice.seed_of()}); --sweeps all runs each"
    if tier != "sample":
        return [line]
    return [line, f"whole, as their rooms changed: {', '.join(sorted(_reached())) or 'none'}"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what this tier does not run."""
    tier = config.getoption("--sweeps")
    if tier not in ONE_IN:
        return
    marked = {
        item.nodeid: mark for item in items for mark in MARKS if item.get_closest_marker(mark)
    }
    reached = _reached() if tier == "sample" else ()
    out = left_out(marked, reached, one_in=ONE_IN[tier], seed=choice.seed_of())
    if tier == "part":
        files = {item.nodeid.partition("::")[0] for item in items}
        kept = choice.drawn(files, seed=choice.seed_of(), one_in=FILES_ONE_IN)
        out |= {item.nodeid for item in items if item.nodeid.partition("::")[0] not in kept}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in out])
    items[:] = [item for item in items if item.nodeid not in out]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Enter a run of everything that passed."""
    config = session.config
    if config.getoption("--sweeps") != "note" or hasattr(config, "workerinput"):
        return
    given = config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    if exitstatus or given or config.option.keyword or config.option.markexpr:
        print(f"\n{KEPT.name} is as it was: it is for runs of everything that pass")
        return
    note(marked_files())
    print(f"\nwrote {KEPT}")
