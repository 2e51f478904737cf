"""Specs as immutable values, which can be compared and hashed.

>>> frozen(["x", ["y", None]])
('x', ('y', None))
"""

from __future__ import annotations

import enum
from typing import Any


class Unset(enum.Enum):
    """The default of arguments for which None means replicate."""

    UNSET = "not given"


UNSET = Unset.UNSET


def frozen(spec: Any) -> Any:
    """Turn the lists of a spec into tuples, recursively; other spellings are returned."""
    if isinstance(spec, list) or type(spec) is tuple:
        return tuple(map(frozen, spec))
    return spec


class Pairs(tuple):
    """A mapping as a tuple of pairs; a class of its own, since a plain tuple is a spec."""


def frozen_pairs(mapping: Any) -> Pairs:
    """Freeze a mapping of specs.

    Example:
        >>> frozen_pairs({"a": ["x", None]})
        (('a', ('x', None)),)
    """
    return Pairs((str(key), frozen(spec)) for key, spec in mapping.items())
