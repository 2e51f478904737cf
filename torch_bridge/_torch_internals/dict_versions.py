"""The version of a dictionary: CPython 3.11 changes it with every write.

>>> settings = {"beta": 0.5}
>>> before = dict_version(settings) if dict_version else 0
>>> settings["beta"] = 0.25
>>> dict_version is None or dict_version(settings) != before
True
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from isoshard.core.runtime.scattered import Scattered

from .declared import NAMES

_version: Any = NAMES.bind(
    "torch._C._dynamo.guards.dict_version",
    otherwise=None,
    why="reports in one look that nothing in a dictionary changed",
    without="the guards of a compiled step compare the values in a dictionary one by one, as they "
    "do on Python 3.12 and later",
)

dict_version: Callable[[dict[Any, Any]], int] | None = (
    _version if sys.version_info < (3, 12) else None
)
"""None where there is no version: from Python 3.12 on torch would watch each dictionary that it
was called with, and call back on every change."""


def _version_offset() -> int | None:
    """The offset of the version from a dictionary's address; None if it cannot be read there."""
    if dict_version is None:
        return None
    probes = [{n: n} for n in range(8)]
    versions = list(map(dict_version, probes))
    for offset in range(16, {}.__sizeof__(), 8):  # behind the reference count and the type
        if list(Scattered([id(probe) + offset for probe in probes], np.uint64).read()) == versions:
            return offset
    return None


_OFFSET = _version_offset()


class DictVersions:
    """The versions of many dictionaries, read at once: from memory, as torch reads them.

    Args:
        spaces: the dictionaries, kept alive.

    Attributes:
        read: gives the present versions, uint64, one for each dictionary.
    """

    def __init__(self, spaces: Sequence[dict[Any, Any]]):
        """See the class."""
        self._spaces = list(spaces)
        if _OFFSET is None:
            self.read: Callable[[], np.ndarray] = functools.partial(_read_versions, self._spaces)
        else:
            self.read = Scattered([id(space) + _OFFSET for space in self._spaces], np.uint64).read


def _read_versions(spaces: list[dict[Any, Any]]) -> np.ndarray:
    """The versions as torch returns them, one after the other."""
    read: Any = dict_version
    return np.fromiter(map(read, spaces), np.uint64, len(spaces))
