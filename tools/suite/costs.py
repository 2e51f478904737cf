"""What each test file costs: a plugin of pytest that writes a table.

    .venv/bin/pytest -p tools.suite.costs --costs out/suite/costs.json -n 2
    python -m tools.suite costs

Seconds are of the processor, of ended subprocesses too; compilations are those of JAX in the test's
own process. What a file's import and its module fixtures take counts for the file. The rows of
files that do not run stay.
"""

from __future__ import annotations

import collections
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

COMPILED = "/jax/core/compile/backend_compile_duration"
SUMS = ("seconds", "compilations", "cases")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--costs`."""
    parser.addoption("--costs", metavar="FILE", help="write what each test file costs")


def pytest_configure(config: pytest.Config) -> None:
    """Start counting where `--costs` is given; in each worker of pytest-xdist too."""
    if config.getoption("costs"):
        config.pluginmanager.register(_Costs(config), "isoshard-costs")


def processor_seconds() -> float:
    """Of this process, its threads, its ended children, and the programs of `tests.fresh`."""
    forked = sys.modules.get("tests.fresh")
    return sum(os.times()[:4]) + (forked.used if forked else 0.0)


class _Costs:
    def __init__(self, config: pytest.Config) -> None:
        import jax.monitoring

        self.table: dict[str, dict[str, float]] = collections.defaultdict(
            lambda: dict.fromkeys(SUMS, 0)
        )
        self.tests: dict[str, float] = collections.defaultdict(float)
        self.failed: set[str] = set()
        self.compilations = 0
        self.root = config.rootpath
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, seconds: float, **_: Any) -> None:
        self.compilations += event == COMPILED

    def _counted(self, file: str, cases: int, test: str = "") -> Iterator[None]:
        seconds, compilations = processor_seconds(), self.compilations
        yield
        row = self.table[file]
        row["seconds"] += processor_seconds() - seconds
        row["compilations"] += self.compilations - compilations
        row["cases"] += cases
        if test:
            self.tests[test] += processor_seconds() - seconds

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Iterator[None]:
        if not isinstance(collector, pytest.Module):
            return (yield)
        counting = self._counted(str(collector.path.relative_to(self.root)), 0)
        next(counting)
        report = yield
        next(counting, None)
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        counting = self._counted(str(item.path.relative_to(self.root)), 1, item.nodeid)
        next(counting)
        result = yield
        next(counting, None)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note what fails; where pytest-xdist controls, of all workers."""
        if report.failed:
            self.failed.add(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["costs"] = {"files": dict(self.table), "tests": dict(self.tests)}
            return
        file = Path(session.config.getoption("costs"))
        file.parent.mkdir(parents=True, exist_ok=True)
        passed = self.tests.keys() - self.failed
        before = json.loads(file.read_text()) if file.exists() else {}
        results = {
            "files": before.get("files", {}) | self.table,
            "tests": before.get("tests", {}) | self.tests,
            "failed": sorted(self.failed.union(before.get("failed", ())).difference(passed)),
        }
        file.write_text(json.dumps(results, indent=1) + "\n")

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Add what a worker of pytest-xdist counted."""
        counted = getattr(node, "workeroutput", {}).get("costs", {})
        for file, row in counted.get("files", {}).items():
            for name, value in row.items():
                self.table[file][name] += value
        for test, seconds in counted.get("tests", {}).items():
            self.tests[test] += seconds


def table(files: Mapping[str, Mapping[str, float]]) -> str:
    """The costs by test file, the dearest first, as Markdown.

    Args:
        files: as `--costs` writes them.
    """
    rows = sorted(files.items(), key=lambda item: -item[1]["seconds"])
    lines = ["| test file | seconds of processor | compilations | cases |", "|---|---|---|---|"]
    for file, row in rows:
        lines.append(
            f"| {file} | {row['seconds']:.1f} | {row['compilations']:.0f} | {row['cases']:.0f} |"
        )
    return "\n".join(lines)
