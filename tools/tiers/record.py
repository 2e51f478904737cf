"""A record: units that passed, the files that ran in each, and a digest of what these held.

It is kept in the repository as JSON, one line for all units with the same files, so that it can be
read, and merged:

    {"versions": {"torch": "2.13.0", ..}, "harness": "02fc..", "common": ["core/errors.py", ..],
     "groups": [{"digest": "8a11..", "files": [..], "units": ["add", "sub"]}]}

A unit's files are those which executed and are not common, and those which are its own, common or
not. Its digest also covers what these files import: a table of constants executes nowhere.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib.metadata
import json
import platform
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from . import sources

PACKAGES = ("torch", "jax", "jaxlib")
COMMON = 0.25
"""A file that more than this share of all units execute is common."""


def versions() -> dict[str, str]:
    """What results depend on beside our files."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"python": python, **{name: importlib.metadata.version(name) for name in PACKAGES}}


@dataclasses.dataclass
class Record:
    """What is known of units that passed.

    Attributes:
        versions: of Python, torch and JAX.
        harness: digest of the files that judge.
        common: files whose changes make no unit run by themselves.
        units: name -> the files that ran in it, without the common ones, and their digest then.
    """

    versions: Mapping[str, str]
    harness: str
    common: frozenset[str]
    units: dict[str, tuple[tuple[str, ...], str]]
    root: Path = sources.ROOT

    def unchanged(self, unit: str) -> bool:
        """Whether a unit passed with its files as they are."""
        if unit not in self.units:
            return False
        files, digest = self.units[unit]
        return self.digest(files) == digest

    def digest(self, files: Iterable[str]) -> str:
        """The digest of a unit's files and of what they import, as they are."""
        files = set(files)
        reached = files.union(*(sources.imported(name, self.root) for name in files))
        return sources.digest((reached - self.common) | files, self.root)

    def note(
        self, ran: Mapping[str, Collection[str]], own: Mapping[str, Collection[str]] = {}
    ) -> None:
        """Enter units that passed.

        Args:
            ran: unit -> all files that ran in it.
            own: unit -> files that count for it though they be common.
        """
        for unit, files in ran.items():
            counted = tuple(sorted((set(files) - self.common).union(own.get(unit, ()))))
            self.units[unit] = counted, self.digest(counted)

    def forget(self, units: Iterable[str]) -> None:
        """Strike units out: they failed, or are no more."""
        for unit in units:
            self.units.pop(unit, None)

    def write(self, path: Path) -> None:
        """Write it."""
        groups: dict[tuple[tuple[str, ...], str], list[str]] = collections.defaultdict(list)
        for unit, known in sorted(self.units.items()):
            groups[known].append(unit)
        lines = [
            json.dumps({"digest": digest, "files": files, "units": units})
            for (files, digest), units in sorted(groups.items())
        ]
        head = {
            "versions": self.versions,
            "harness": self.harness,
            "common": sorted(self.common),
        }
        text = json.dumps(head, indent=0)[:-2] + ',\n"groups": [\n' + ",\n".join(lines) + "\n]\n}\n"
        path.write_text(text)


def new(
    ran: Mapping[str, Collection[str]],
    harness: Iterable[str],
    root: Path = sources.ROOT,
    own: Mapping[str, Collection[str]] = {},
) -> Record:
    """A record of a whole run.

    Args:
        ran: unit that passed -> the files that ran in it.
        harness: the files that judge.
        root: of the repository.
        own: see `Record.note`.

    Returns:
        The record, which has decided what is common.
    """
    harness = frozenset(harness)
    counted = collections.Counter(name for files in ran.values() for name in set(files))
    often = {name for name, times in counted.items() if times > COMMON * len(ran)}
    made = Record(versions(), sources.digest(harness, root), frozenset(often | harness), {}, root)
    made.note(ran, own)
    return made


def read(path: Path, harness: Iterable[str], root: Path = sources.ROOT) -> Record | None:
    """Read a record; None if there is none for these versions and this harness."""
    if not path.is_file():
        return None
    kept = json.loads(path.read_text())
    if kept["versions"] != versions() or kept["harness"] != sources.digest(harness, root):
        return None
    units = {
        unit: (tuple(group["files"]), group["digest"])
        for group in kept["groups"]
        for unit in group["units"]
    }
    return Record(kept["versions"], kept["harness"], frozenset(kept["common"]), units, root)
