"""Values as keys that are equal only where no code can tell the values apart.

For what was worked out once for a constant of a program. `==` does not do: 0.0 is not -0.0, 1 is
not True, and NaN is NaN. So it is with NumPy's numbers, named tuples and frozen sets.

>>> exact(0.0) == exact(-0.0), exact(1) == exact(True), exact(float("nan")) == exact(float("nan"))
(False, False, True)
>>> exact((1, 2.0)) == exact((1, 2))
False
"""

from __future__ import annotations

from typing import Any

import numpy as np


def exact(value: Any) -> Any:
    """A hashable key for a hashable value.

    Args:
        value: anything hashable; numbers are distinguished in tuples of any depth, too.
    """
    kind = type(value)
    if kind is float or kind is complex:
        return (kind, repr(value))
    if isinstance(value, np.generic):  # np.float64 is a float, too
        return (kind, value.tobytes())
    if isinstance(value, float):  # of a class of its own, with whatever that adds
        return (kind, float.__repr__(value), value)
    if isinstance(value, tuple):
        return (kind, *map(exact, value))
    if isinstance(value, frozenset):
        return (kind, frozenset(map(exact, value)))
    return (kind, value)
