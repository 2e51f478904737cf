"""The tests that `make test` runs a sample of: a plugin of pytest, which tests/conftest.py loads.

Each test file has *rooms*: for `tests/A/B/test_x.py` the folder `A/B` (of a test of lowerings:
`x.py` there), what `_ABOUT` adds, and the test with the helpers beside it. Test files in `tests/`
itself are about the whole house. Within a file, two marks say that a test has a place in
`make test-all`, and a share of `make test`:

- `sweep`: a function over a table of like cases. At least one case of it runs.
- `long`: one check of several seconds, with shorter ones beside it.
- `page`: a function over pages of the documentation, whose cases have their paths as names. A page
  that changed since it passed runs; of the others as of a sweep.

`--sweeps all`, as pytest does by itself, runs every case. `--sweeps sample` runs whole the test
files whose rooms changed since all passed, those in `tests/` itself, and one in six of the others;
of these one case in eight of each sweep, and one long test in eight. Where a change reaches more
than an eighth of all test files, one in six of those runs, too. A file that the command line names
always runs.

`--sweeps few` runs one marked case in forty, whatever changed; `--sweeps part` does so in one test
file of twelve. `--sweeps note` runs everything, and if that passes enters what the rooms hold in
`tests/sweeps.json`.
"""

from __future__ import annotations

import collections
import functools
import json
from collections.abc import Collection, Mapping, Set
from pathlib import Path

import pytest

from . import choice, record, sources

KEPT = sources.ROOT / "tests" / "sweeps.json"
ONE_IN = {"sample": 8, "few": 40, "part": 40}
FILES_ONE_IN = {"sample": 6, "part": 12}
MOST_REACHED = 1 / 8
"""Where a change reaches a larger share of all test files than this, it reaches none whole."""

PAGES = "tests/test_doc_blocks.py"
"""Runs the programs of the README and of `docs`."""

APART = ("tests/multi_process/", "tests/with_torch_xla/", "tests/clusters/")
"""Folders that pytest enters only where they are named."""

MARKS = {
    "sweep": "a table of like cases; make test runs a sample, make test-all each",
    "long": "one check of several seconds; make test runs one in eight, make test-all each",
    "page": "a page that changed runs; of the others make test runs a sample, make test-all each",
}
_LOWERINGS = "torch_bridge/lowerings"
_HARNESS = "tools/harness"
_ABOUT = {
    "torch_bridge/training": (_LOWERINGS,),
    "torch_bridge/models": (_LOWERINGS,),
    "torch_bridge/autograd": (_LOWERINGS,),
    "torch_bridge/overrides": (_LOWERINGS,),
    "torch_bridge/domain": ("core/domain",),
    "torch_bridge/dtensor/operators": (_LOWERINGS, "torch_bridge/distributed", "torch_bridge/spmd"),
    "torch_bridge/lowerings": (_LOWERINGS,),  # of tests that no lowering file has the name of
    "examples/domain": ("core/domain",),
    "cli": ("src/isoshard/cli",),
    "ecosystem": ("torch_bridge/trainers", "torch_bridge/overrides"),
    "jax_pages": ("torch_bridge/interop",),
    "torch_bridge/engine/capture/changes": ("torch_bridge/engine/capture", "torch_bridge/loops"),
    "multi_process": ("core/processes", "torch_bridge/dtensor", "tests/multi_process/jobs"),
    "clusters": ("core/processes", "examples/clusters", "tests/multi_process"),
    "notebooks": ("examples/notebooks",),
    "suite": ("tools/suite",),
    "torch_bridge/generated": ("torch_bridge/engine/capture", "torch_bridge/interop", _LOWERINGS),
    "tiers": ("tools/tiers",),
    "harness": (_HARNESS,),
    "device_check": (_HARNESS, "tools/device_check", "benchmarks/models", "benchmarks/by_hand"),
    "fuzz": (_HARNESS, "tests/fuzz/operations"),
    "conformance": (_HARNESS,),
    "dtensor_suite": (_HARNESS, "torch_bridge/distributed", "tests/dtensor_suite"),
    "aot": (_HARNESS,),
    "benchmarks": (_HARNESS, "benchmarks"),
    "versions": ("tools/versions",),
    "newcomer": ("core/plan", "core/transfer", "torch_bridge/interop", "torch_bridge/spmd"),
}


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


def test_files(root: Path = sources.ROOT) -> list[str]:
    """The test files that have rooms."""
    tests = (p.relative_to(root).as_posix() for p in (root / "tests").rglob("test_*.py"))
    return sorted(path for path in tests if path.count("/") > 1 and not path.startswith(APART[1]))


def changed(paths: Collection[str], kept: Path = KEPT, root: Path = sources.ROOT) -> Set[str]:
    """The test files whose rooms are not as they were when all passed; all for other versions."""
    files = _noted(kept).get("files", {})
    return {path for path in paths if files.get(path) != _state(path, root)}


def changed_pages(pages: Collection[str], kept: Path = KEPT, root: Path = sources.ROOT) -> Set[str]:
    """The pages that are not as they were when they passed; all for other versions."""
    noted = _noted(kept).get("pages", {})
    return {page for page in pages if noted.get(page) != sources.digest([page], root)}


def note(
    paths: Collection[str],
    kept: Path = KEPT,
    root: Path = sources.ROOT,
    *,
    pages: Collection[str] = (),
) -> None:
    """Enter test files whose tests all pass, and pages; what other runs entered stays.

    Args:
        paths: of the test files.
        kept: where.
        root: of the repository.
        pages: whose programs passed.
    """
    before = _noted(kept)
    states = {path: _state(path, root) for path in paths}
    digests = {page: sources.digest([page], root) for page in pages}
    content = {
        "versions": record.versions(),
        "files": _renewed(before.get("files", {}), states, root),
        "pages": _renewed(before.get("pages", {}), digests, root),
    }
    kept.write_text(json.dumps(content, indent=0) + "\n")


def _renewed(before: Mapping[str, str], now: Mapping[str, str], root: Path) -> dict[str, str]:
    there = {path: state for path, state in before.items() if (root / path).is_file()}
    return dict(sorted({**there, **now}.items()))


def _noted(kept: Path) -> dict[str, dict[str, str]]:
    """What is noted of these versions; empty for others."""
    known = json.loads(kept.read_text()) if kept.is_file() else {}
    return known if known.get("versions") == record.versions() else {}


def _state(path: str, root: Path) -> str:
    return sources.digest(rooms_of(path, root), root)


def left_out(
    marked: Mapping[str, str], reached: Collection[str], *, one_in: int, seed: str
) -> Set[str]:
    """The tests that do not run.

    Args:
        marked: test -> `sweep` or `long`; a `page` counts as one of a sweep.
        reached: test files that run whole.
        one_in: of the other tests, the share that runs.
        seed: draws them.

    Returns:
        Names out of `marked`.
    """
    groups: dict[str, list[str]] = collections.defaultdict(list)
    for test, mark in marked.items():
        if test.partition("::")[0] not in reached:
            groups[mark if mark == "long" else test.partition("[")[0]].append(test)
    kept = (choice.drawn(tests, seed=seed, one_in=one_in) for tests in groups.values())
    return {test for tests in groups.values() for test in tests}.difference(*kept)


def drawn_files(
    every: Collection[str], reached: Set[str], *, one_in: int, seed: str
) -> tuple[Set[str], Set[str]]:
    """The test files that run, and those of them that run whole.

    Args:
        every: all that have rooms.
        reached: those whose rooms changed.
        one_in: of the others, and of these where they are too many, the share that runs; at least
            one of each folder in `tests/`.
        seed: draws them.
    """
    whole = reached if len(reached) <= MOST_REACHED * len(every) else frozenset()
    groups: dict[str, list[str]] = collections.defaultdict(list)
    for path in set(every) - whole:
        groups[path.split("/")[1]].append(path)
    drawn = (choice.drawn(paths, seed=seed, one_in=one_in) for paths in groups.values())
    return whole.union(*drawn), whole


_every = functools.cache(test_files)


@functools.cache
def _drawn(tier: str) -> tuple[Set[str], Set[str]]:
    """What a tier runs of the test files that have rooms, and what of these whole."""
    every = _every()
    reached = changed(every) if tier == "sample" else frozenset()
    return drawn_files(every, reached, one_in=FILES_ONE_IN.get(tier, 1), seed=choice.seed_of())


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
    if tier not in FILES_ONE_IN:
        return [line]
    runs, whole = _drawn(tier)
    of = f"{len(runs)} of {len(_every())} test files"
    return [line, f"{of}; whole, as their rooms changed: {', '.join(sorted(whole)) or 'none'}"]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the test files that this tier does not run."""
    tier = config.getoption("--sweeps")
    named = {Path(word.partition("::")[0]).absolute() for word in config.args}
    if tier not in FILES_ONE_IN or collection_path in named:
        return None
    path = collection_path.relative_to(sources.ROOT).as_posix()
    return True if path in _every() and path not in _drawn(tier)[0] else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the marked cases that this tier does not run."""
    tier = config.getoption("--sweeps")
    if tier not in ONE_IN:
        return
    marked = {
        item.nodeid: mark for item in items for mark in MARKS if item.get_closest_marker(mark)
    }
    pages = {test: test.partition("[")[2][:-1] for test in marked if marked[test] == "page"}
    renewed = changed_pages({*pages.values()})
    marked = {test: mark for test, mark in marked.items() if pages.get(test) not in renewed}
    whole = _drawn(tier)[1]
    out = left_out(marked, whole, one_in=ONE_IN[tier], seed=choice.seed_of())
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in out])
    items[:] = [item for item in items if item.nodeid not in out]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Enter the test files of a run that passed."""
    config = session.config
    if config.getoption("--sweeps") != "note" or hasattr(config, "workerinput"):
        return
    if exitstatus or config.option.keyword or config.option.markexpr:
        print(f"\n{KEPT.name} is as it was: it is for files that pass whole")
        return
    folders = [Path(word).absolute().relative_to(sources.ROOT).as_posix() for word in config.args]
    pages = [p.relative_to(sources.ROOT).as_posix() for p in sources.ROOT.glob("docs/*.md")]
    programs = ["README.md", *pages] if _ran(PAGES, folders) else []
    note([path for path in _every() if _ran(path, folders)], pages=programs)
    print(f"\nwrote {KEPT}")


def _ran(path: str, folders: Collection[str]) -> bool:
    """Whether a run over some folders enters a test file."""
    apart = next((folder for folder in APART if path.startswith(folder)), "")
    inside = [f"{folder}/" for folder in folders if f"{path}/".startswith(f"{folder}/")]
    return any(folder.startswith(apart) for folder in inside)
