"""Which lines of isoshard each test function executes: a plugin of pytest (Python 3.12 or later).

    .venv/bin/pytest -p tools.suite.lines --lines out/suite/lines.json -n 2
    python -m tools.suite spare

A line is seen once in each test (`sys.monitoring`), which costs a tenth of the time. `spare` names
the test functions whose lines others execute as well, so that all lines stay executed without them:
where to look for what is tested twice. Whether a test is needed, mutants say.
"""

from __future__ import annotations

import collections
import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from isoshard.core.installation import ANNEXES, HEART

from .costs import processor_seconds

PACKAGES = (*HEART, *ANNEXES)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--lines`."""
    parser.addoption("--lines", metavar="FILE", help="write which lines each test executes")


def pytest_configure(config: pytest.Config) -> None:
    """Start noting where `--lines` is given; in each worker of pytest-xdist too."""
    if not config.getoption("lines"):
        return
    if sys.version_info < (3, 12):
        raise pytest.UsageError("--lines needs sys.monitoring, which Python has from 3.12 on")
    config.pluginmanager.register(_Lines(), "isoshard-lines")


class _Lines:
    def __init__(self) -> None:
        self.tests: dict[str, dict[str, Any]] = {}
        self.here: dict[str, set[int]] = {}
        origin = importlib.util.find_spec("isoshard.core").origin  # type: ignore[union-attr]
        root = Path(origin).parents[1]  # type: ignore[arg-type]
        self.root = f"{root}{os.sep}"
        self.ours = tuple(f"{self.root}{name}{os.sep}" for name in PACKAGES)
        self.monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
        self.tool = self.monitoring.COVERAGE_ID
        self.monitoring.use_tool_id(self.tool, "isoshard-lines")
        self.monitoring.register_callback(self.tool, self.monitoring.events.LINE, self._executed)

    def _executed(self, code: CodeType, line: int) -> Any:
        if code.co_filename.startswith(self.ours):
            file = code.co_filename.removeprefix(self.root)
            self.here.setdefault(file, set()).add(line)
        return self.monitoring.DISABLE  # until the next test

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.here, seconds = {}, processor_seconds()
        self.monitoring.restart_events()
        self.monitoring.set_events(self.tool, self.monitoring.events.LINE)
        result = yield
        self.monitoring.set_events(self.tool, 0)
        row = self.tests.setdefault(item.nodeid.partition("[")[0], {"seconds": 0.0, "lines": {}})
        row["seconds"] += processor_seconds() - seconds
        for file, lines in self.here.items():
            row["lines"][file] = sorted(lines.union(row["lines"].get(file, ())))
        return result

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["lines"] = self.tests
            return
        file = Path(session.config.getoption("lines"))
        file.parent.mkdir(parents=True, exist_ok=True)
        before = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(before | self.tests) + "\n")

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Add what a worker of pytest-xdist saw: the cases of a function may be in several."""
        for test, seen in getattr(node, "workeroutput", {}).get("lines", {}).items():
            row = self.tests.setdefault(test, {"seconds": 0.0, "lines": {}})
            row["seconds"] += seen["seconds"]
            for file, lines in seen["lines"].items():
                row["lines"][file] = sorted({*lines, *row["lines"].get(file, ())})


def spare(tests: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The test functions without which all lines stay executed, the dearest first.

    Args:
        tests: as `--lines` writes them.
    """
    times = collections.Counter(
        (file, line)
        for test in tests.values()
        for file, lines in test["lines"].items()
        for line in lines
    )
    names = []
    for name, test in sorted(tests.items(), key=lambda item: -item[1]["seconds"]):
        own = [(file, line) for file, lines in test["lines"].items() for line in lines]
        if all(times[place] > 1 for place in own):
            times.subtract(own)
            names.append(name)
    return names
