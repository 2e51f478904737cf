"""The number that CPython 3.11 gives a dictionary anew whenever it changes.

>>> settings = {"beta": 0.5}
>>> before = dict_version(settings) if dict_version else 0
>>> settings["beta"] = 0.25
>>> dict_version is None or dict_version(settings) != before
True
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from .declared import NAMES

_version: Any = NAMES.bind(
    "torch._C._dynamo.guards.dict_version",
    otherwise=None,
    why="tells in one look that nothing in a dictionary changed",
    without="the guards of a compiled step compare the values in a dictionary one by one, as they "
    "do on Python 3.12 and later",
)

dict_version: Callable[[dict[Any, Any]], int] | None = (
    _version if sys.version_info < (3, 12) else None
)
"""None where there is no such number: from Python 3.12 on torch would watch each dictionary that it
was asked about, and call back on every change."""
