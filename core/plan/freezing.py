"""What a plan keeps of what it was given: values that can be compared and hashed.

>>> frozen(["x", ["y", None]])
('x', ('y', None))
"""

from __future__ import annotations

import enum
from typing import Any


class Unsaid(enum.Enum):
    """Marks what was not given, as None means replicate."""

    UNSAID = "not given"


UNSAID = Unsaid.UNSAID


def frozen(spec: Any) -> Any:
    """Turn the lists of a spec into tuples, all the way down; other spellings stay."""
    if isinstance(spec, list) or type(spec) is tuple:
        return tuple(map(frozen, spec))
    return spec


class Pairs(tuple):
    """A mapping as a tuple of pairs, which is no spec."""


def frozen_pairs(given: Any) -> Pairs:
    """Freeze a mapping of specs.

    Example:
        >>> frozen_pairs({"a": ["x", None]})
        (('a', ('x', None)),)
    """
    return Pairs((str(key), frozen(spec)) for key, spec in given.items())
