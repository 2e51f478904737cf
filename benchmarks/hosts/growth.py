"""How numbers grow with the processes: fitted where they were measured, said where they were not.

>>> requests = fitted((2, 4, 8), (8, 14, 26))
>>> requests.shape, requests.at(1024)
('n', 3074.0)
>>> fitted((2, 4, 8), (3, 3, 3)).shape, fitted((2, 4, 8), (5, 7, 9)).shape
('constant', 'log n')
>>> fitted((2, 4, 8), (12, 48, 192)).shape
'n²'
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda n: 0.0,
    "log n": math.log2,
    "n": float,
    "n²": lambda n: float(n * n),
}
"""From the slowest growth to the fastest."""


@dataclasses.dataclass(frozen=True)
class Growth:
    """A number of n processes: `base + slope * shape(n)`.

    Attributes:
        shape: a key of `SHAPES`.
        base: of it.
        slope: of it.
    """

    shape: str
    base: float
    slope: float

    def at(self, n: float) -> float:
        """The number for `n` processes."""
        return self.base + self.slope * SHAPES[self.shape](n)


def fitted(
    sizes: Sequence[int],
    values: Sequence[float],
    slack: float = 0.02,
    shapes: Sequence[str] = tuple(SHAPES),
) -> Growth:
    """The slowest growth that explains numbers; or that which comes closest, if none does.

    Numbers that fall are taken for constant.

    Args:
        sizes: numbers of processes.
        values: what was measured with them.
        slack: how far the fit may be from a value, as a part of the largest.
        shapes: that may be.
    """
    allowed = slack * max(map(abs, values))
    fits = []
    for shape in shapes:
        of = SHAPES[shape]
        columns = [[1.0, of(n)] if shape != "constant" else [1.0] for n in sizes]
        base, *slope = np.linalg.lstsq(np.array(columns), np.array(values, float), rcond=None)[0]
        growth = Growth(shape, round(float(base), 9), round(float(sum(slope)), 9))
        off = max(abs(growth.at(n) - value) for n, value in zip(sizes, values, strict=True))
        if growth.slope < 0:
            continue  # shares of something become smaller, but not less than nothing
        if off <= allowed:
            return growth
        fits.append((off, growth))
    return min(fits, key=lambda pair: pair[0])[1]


def error(growth: Growth, sizes: Sequence[int], values: Sequence[float]) -> float:
    """How far what is foretold is from what was measured, at most, as a part of that.

    Args:
        growth: fitted to other sizes.
        sizes: of processes.
        values: what was measured with them.
    """
    pairs = zip(sizes, values, strict=True)
    return max(abs(growth.at(n) / value - 1) if value else abs(growth.at(n)) for n, value in pairs)
