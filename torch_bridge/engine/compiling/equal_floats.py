"""Lifted floats that are equal enter a program once.

An optimizer divides each parameter by a bias correction of its own: the same number, from a step
count of its own. As so many inputs they would make each parameter's update another kernel, and
XLA compiles equal kernels once: with one input for all, AdamW over 75 tensors is 18 kernels in
place of 174. The numbers are compared in each run; once they differ, the program is compiled again
with an input for each.

>>> floats = EqualFloats.of(["a", "b", "a", "a"])
>>> values = np.array([0.5, 2.0, 0.5, 0.5])
>>> floats.fit(values), floats.distinct(values).tolist(), floats.each(["x", "y"])
(True, [0.5, 2.0], ['x', 'y', 'x', 'x'])
>>> floats.fit(np.array([0.5, 2.0, 0.5, 0.25]))
False
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from isoshard.torch_bridge.engine.recording.recipes import RECIPES

FEW = 8
"""Equal floats of one operation below which they may be equal by chance: a program compiled for
them would be compiled again at the first difference."""


@dataclasses.dataclass(frozen=True, eq=False)
class EqualFloats:
    """Which lifted floats of a program are one input.

    Attributes:
        firsts: the first float of each input, in ascending order.
        inputs: for each float, its input.
    """

    firsts: np.ndarray
    inputs: np.ndarray

    @functools.cached_property
    def _like(self) -> np.ndarray:
        """For each float the first one of its input."""
        return self.firsts[self.inputs]

    @classmethod
    def of(cls, names: Sequence[Hashable]) -> EqualFloats | None:
        """Floats of one name are one input; None if no two are.

        Args:
            names: of each float.
        """
        first: dict[Hashable, int] = {}
        firsts = [first.setdefault(name, index) for index, name in enumerate(names)]
        if len(first) == len(firsts):
            return None
        chosen, inputs = np.unique(np.array(firsts, np.intp), return_inverse=True)
        return cls(chosen, inputs)

    def fit(self, values: np.ndarray) -> bool:
        """Whether floats that are one input are equal to the last bit."""
        # Their bytes: 0.0 is not -0.0, and NaN is NaN.
        return values.take(self._like).tobytes() == values.tobytes()

    def distinct(self, values: np.ndarray) -> np.ndarray:
        """The value of each input."""
        return values.take(self.firsts)

    def each(self, inputs: Any) -> list[Any]:
        """For each float its input."""
        chosen = [inputs[index] for index in range(len(self.firsts))]
        return [chosen[index] for index in self.inputs]


def equal_now(program: Sequence[Any], values: Sequence[float]) -> EqualFloats | None:
    """The floats of recorded entries that are one input: those of one operation, if many are equal.

    Args:
        program: the entries.
        values: their lifted floats.
    """
    entries = [entry[0] for entry in program if isinstance(entry[0], int)]
    recipes = [recipe for recipe in entries for _ in range(RECIPES[recipe].lifted)]
    names = list(zip(recipes, values, strict=True))
    counts = collections.Counter(names)
    # Rates of 0 are often those of a first step, and will differ in the next one.
    return EqualFloats.of(
        [name if name[1] and counts[name] >= FEW else index for index, name in enumerate(names)]
    )
