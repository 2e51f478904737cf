"""What came out: `results.json` here, for the tables of docs/conformance.md and docs/aot.md."""

from __future__ import annotations

import collections
import datetime
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tools.harness import results as files
from tools.harness import tables

RESULTS = files.ROOT / "tests" / "aot" / "results.json"
DOCUMENT = files.ROOT / "docs" / "aot.md"
_PACKAGES = ("torch", "jax", "jaxlib")
STEP = "step"
"""The one column of model families, styles and exchanges."""


class Row(NamedTuple):
    """What became of one program.

    Attributes:
        entry: of the database, or the name of a step.
        columns: of the conformance table; ("step",) of a step.
        status: "pass", "host" (the host computes an operator of it), "refused", "crash" or
            "timeout".
        reason: why it did not pass.
    """

    entry: str
    columns: tuple[str, ...]
    status: str
    reason: str


Cells = dict[str, dict[str, str]]
"""Entry -> column -> "pass", "host", or what became of it and why."""


def cells_of(rows: Sequence[Row]) -> Cells:
    """What holds for each column of each entry: its first program that does not pass, if any.

    Args:
        rows: of programs.
    """
    found: Cells = collections.defaultdict(dict)
    for row in rows:
        word = f"{row.status}: {row.reason}" if row.reason else row.status
        for column in row.columns:
            had = found[row.entry].get(column, "pass")
            if had == "pass" or (had == "host" and row.status != "pass"):
                found[row.entry][column] = word
    return dict(found)


def compiles(word: str) -> bool:
    """Whether a cell is good.

    Args:
        word: "pass", "host", or what is wrong.
    """
    return word in ("pass", "host")


def write(
    cells: Mapping[str, Cells],
    versions: Mapping[str, Mapping[str, str]],
    path: Path | None = None,
) -> Path:
    """Write the results for tools.

    Args:
        cells: target -> its cells.
        versions: target -> of its compiler's packages.
        path: of the file; None for the one that is committed.
    """
    found = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": files.versions(_PACKAGES),
        "compilers": {name: dict(one) for name, one in versions.items()},
        "targets": {
            name: {entry: dict(sorted(one.items())) for entry, one in sorted(found.items())}
            for name, found in cells.items()
        },
    }
    return files.write_rows(path or RESULTS, found, levels=3)


def kept(target: str, installed: Mapping[str, str]) -> Cells:
    """The committed cells of a target; none if they are of other versions.

    Args:
        target: its name.
        installed: versions of the compiler's packages.
    """
    found = read()
    compilers = found.get("compilers", {}).get(target, {})
    same = same_versions(compilers, installed) and _of_these_versions(found)
    return found["targets"].get(target, {}) if same else {}


def same_versions(made: Mapping[str, str], installed: Mapping[str, str]) -> bool:
    """Whether packages that made a result are those that are installed.

    Args:
        made: their versions then.
        installed: versions now, of some or all.
    """
    return all(made.get(name, version) == version for name, version in installed.items())


def note(target: str, cells: Cells, versions: Mapping[str, str]) -> Path:
    """Write the cells of one target, and keep those of others that are of the same versions.

    Args:
        target: its name.
        cells: all of it.
        versions: of its compiler's packages; empty if nothing was compiled now.
    """
    found = read()
    usable = _of_these_versions(found)
    targets = found["targets"] if usable else {}
    compilers = found.get("compilers", {}) if usable else {}
    used = {target: versions} if versions else {}
    return write(targets | {target: cells}, compilers | used)


def _of_these_versions(found: Mapping[str, Any]) -> bool:
    """Whether results are of the packages here, whose programs they are of."""
    made, here = found.get("versions", {}), files.versions(_PACKAGES)
    return all(made.get(name) == here.get(name) for name in _PACKAGES)


def read(path: Path | None = None) -> dict[str, Any]:
    """The results written before; without targets if there are none.

    Args:
        path: of the file; None for the one that is committed.
    """
    path = path or RESULTS
    return json.loads(path.read_text()) if path.exists() else {"targets": {}}


def summary(cells: Mapping[str, Cells]) -> str:
    """Shares by target and column as a Markdown table.

    Args:
        cells: target -> its cells.
    """
    rows = []
    for target, entries in cells.items():
        words = collections.defaultdict(list)
        for found in entries.values():
            for column, word in found.items():
                words[column].append(compiles(word))
        order = {name: place for place, name in enumerate(COLUMNS)}
        for column, passed in sorted(words.items(), key=lambda one: order.get(one[0], 99)):
            share = f"{sum(passed) / len(passed):.1%}"
            rows.append([target, column, str(len(passed)), str(sum(passed)), share])
    return tables.markdown(("target", "column", "tried", "compile", "share"), rows, right=True)


COLUMNS = ("forward", "backward", "bfloat16", "float64", "complex128", "int64", STEP)
"""Of the conformance table those whose samples are compiled, and that of steps."""


def short(reason: str) -> str:
    """A reason without what differs from program to program.

    Args:
        reason: a compiler's words.
    """
    return re.sub(r"%[\w.\-]+|\d+|\[[^\]]*\]|\{[^}]*\}", "#", reason)[:160]


def by_reason(cells: Cells) -> dict[str, list[str]]:
    """Reason -> the entries and columns that do not compile for it, the most frequent first.

    Args:
        cells: of one target.
    """
    found = collections.defaultdict(list)
    for entry, columns in cells.items():
        for column, word in columns.items():
            if not compiles(word):
                found[short(word)].append(f"{entry} ({column})")
    return dict(sorted(found.items(), key=lambda one: -len(one[1])))


def refused(cells: Mapping[str, Cells]) -> list[str]:
    """One line for each reason: how many cells, and the first few of them.

    Args:
        cells: target -> its cells.
    """
    lines = []
    for target, found in cells.items():
        for reason, names in by_reason(found).items():
            more = f" and {len(names) - 8} more" if len(names) > 8 else ""
            lines.append(f"{target}: {len(names)}x {reason}: {', '.join(names[:8])}{more}")
    return lines
