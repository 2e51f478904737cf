"""Values as keys that are equal only where no code can tell the values apart.

For what was worked out once for a constant of a program. `==` does not do: 0.0 is not -0.0, 1 is
not True, and NaN is NaN.

>>> exact(0.0) == exact(-0.0), exact(1) == exact(True), exact(float("nan")) == exact(float("nan"))
(False, False, True)
>>> exact((1, 2.0)) == exact((1, 2))
False
"""

from __future__ import annotations

from typing import Any


def exact(value: Any) -> Any:
    """A hashable key for a hashable value.

    Args:
        value: anything hashable; numbers are told apart in tuples of any depth, too.
    """
    kind = type(value)
    if kind is float or kind is complex:
        return (kind, repr(value))
    if kind is tuple:
        return (kind, *map(exact, value))
    return (kind, value)
