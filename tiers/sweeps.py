"""The tests that `make test` runs a sample of: a plugin of pytest, which tests/conftest.py loads.

Two marks say that a test has a place in `make test-all`, and a share of `make test`:

- `sweep`: a function over a table of like cases. At least one case of it always runs.
- `long`: one check of several seconds, with shorter ones beside it.

`--sweeps all`, as pytest does by itself, runs every case. `--sweeps sample` runs each marked
function that a change reaches (`tiers.record`), and of the others one case in five, or one long
test in five. `--sweeps few` runs one case in twenty, whatever changed. `--sweeps note` runs
everything, and enters in the record which files executed in what passed.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from . import choice, record, sources, tracing
from .lowerings import Lowerings

RECORD = sources.ROOT / "tests" / "sweeps.json"
HARNESS = ("tests/conftest.py",)
ONE_IN = {"sample": 5, "few": 20}
MARKS = {
    "sweep": "a table of like cases; make test runs a sample, make test-all each",
    "long": "one check of several seconds; make test runs one in five, make test-all each",
}
_NOTES = pytest.StashKey["Notes"]()


def unit_of(nodeid: str) -> str:
    """The function of a test, without the case."""
    return nodeid.partition("[")[0]


def left_out(
    marked: dict[str, str], record: record.Record | None, *, one_in: int, seed: str
) -> set[str]:
    """The tests that do not run.

    Args:
        marked: test -> `sweep` or `long`.
        record: of functions that passed; those without one, or which a change reaches, run whole.
        one_in: of the other tests, the share that runs.
        seed: draws them.

    Returns:
        Names out of `marked`.
    """
    groups: dict[str, list[str]] = collections.defaultdict(list)
    for test, mark in marked.items():
        unit = unit_of(test)
        if record is None or record.unchanged(unit):
            groups[unit if mark == "sweep" else mark].append(test)
    kept = (choice.drawn(tests, seed=seed, one_in=one_in) for tests in groups.values())
    return {test for tests in groups.values() for test in tests}.difference(*kept)


class Notes:
    """What ran in the marked functions of this process, and which of them failed."""

    def __init__(self) -> None:
        """Watch the lowerings."""
        self.ran: dict[str, set[str]] = collections.defaultdict(set)
        self.failed: set[str] = set()
        self._watched = Lowerings()
        self._last = ""

    def note(self, unit: str) -> Iterator[None]:
        """Trace while a test runs; a generator, as pytest's wrappers are."""
        if unit != self._last:
            self._watched.forget()
            self._last = unit
        with tracing.executed() as files:
            yield
        self.ran[unit].update(files, self._watched.files)

    def of_worker(self) -> dict[str, Any]:
        """The notes in a form that a worker process can send."""
        return {"ran": {u: sorted(f) for u, f in self.ran.items()}, "failed": sorted(self.failed)}

    def add(self, sent: dict[str, Any]) -> None:
        """Take over what a worker process sent."""
        for unit, files in sent["ran"].items():
            self.ran[unit].update(files)
        self.failed.update(sent["failed"])


def enter(
    ran: dict[str, set[str]], failed: Iterable[str], path: Path = RECORD, root: Path = sources.ROOT
) -> record.Record:
    """Enter functions in the record; one that failed is struck out.

    Args:
        ran: function -> the files that executed.
        failed: some of them.
        path: of the record.
        root: of the repository.

    Returns:
        What was written. It is made anew where `ran` has all of its functions.
    """
    failed = set(failed)
    good = {unit: files for unit, files in ran.items() if unit not in failed}
    kept = record.read(path, HARNESS, root)
    if kept is None or kept.units.keys() <= ran.keys():
        kept = record.new(good, HARNESS, root)
    else:
        kept.note(good)
        kept.forget(failed)
    kept.write(path)
    return kept


def _mark_of(item: pytest.Item) -> str | None:
    return next((mark for mark in MARKS if item.get_closest_marker(mark)), None)


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option."""
    parser.addoption(
        "--sweeps",
        choices=["all", "sample", "few", "note"],
        default="all",
        help="which cases of tests marked sweep or long: see tiers/sweeps.py (all)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Name the marks; begin to note."""
    for name, about in MARKS.items():
        config.addinivalue_line("markers", f"{name}: {about}")
    if config.getoption("--sweeps") == "note":
        config.stash[_NOTES] = Notes()


def pytest_report_header(config: pytest.Config) -> str | None:
    """The seed."""
    tier = config.getoption("--sweeps")
    if tier not in ONE_IN:
        return None
    one_in, seed = ONE_IN[tier], choice.seed_of()
    return f"sweeps: one case in {one_in}, seed {seed}, of what is as it was; --sweeps all runs all"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what this tier does not run."""
    tier = config.getoption("--sweeps")
    if tier not in ONE_IN:
        return
    marked = {item.nodeid: mark for item in items if (mark := _mark_of(item))}
    known = record.read(RECORD, HARNESS) if tier == "sample" else None
    if tier == "sample" and known is None:
        return
    out = left_out(marked, known, one_in=ONE_IN[tier], seed=choice.seed_of())
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in out])
    items[:] = [item for item in items if item.nodeid not in out]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Note what a marked test executes."""
    notes = item.config.stash.get(_NOTES, None)
    if notes is None or _mark_of(item) is None:
        return (yield)
    noting = notes.note(unit_of(item.nodeid))
    next(noting)
    try:
        return (yield)
    finally:
        next(noting, None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Note what fails."""
    report: Any = yield
    notes = item.config.stash.get(_NOTES, None)
    if notes is not None and report.failed:
        notes.failed.add(unit_of(item.nodeid))
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Take over the notes of a worker of pytest-xdist that has ended."""
    notes = node.config.stash.get(_NOTES, None)
    if notes is not None and "sweeps" in getattr(node, "workeroutput", {}):
        notes.add(node.workeroutput["sweeps"])


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand the notes on, or enter them."""
    config: Any = session.config
    notes = config.stash.get(_NOTES, None)
    if notes is None:
        return
    if hasattr(config, "workeroutput"):
        config.workeroutput["sweeps"] = notes.of_worker()
    elif notes.ran:
        kept = enter(notes.ran, notes.failed)
        print(f"\nwrote {RECORD}: {len(kept.units)} functions")
