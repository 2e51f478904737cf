"""What a training run leaves, in either framework.

>>> run = Run([1.0, 0.5], lambda x: 0.9 * x, 1, "ROOT %a = f32[4]{0} all-reduce(%p)")
>>> run.collectives
{'all-reduce': 1}
>>> run.rollout(np.ones((1, 2)), 2).round(2).tolist()
[[[1.0, 1.0], [0.9, 0.9], [0.81, 0.81]]]
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable
from typing import Any

import numpy as np

_COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)


@dataclasses.dataclass(frozen=True)
class Run:
    """A trained network.

    Attributes:
        losses: of each step.
        predict: from fields to those one interval later, as NumPy arrays.
        memory: bytes that the training step takes on each device.
        program: the text of the training step.
    """

    losses: list[float]
    predict: Callable[[np.ndarray], np.ndarray]
    memory: int
    program: str

    @property
    def collectives(self) -> dict[str, int]:
        """How many of each kind stand in the training step; in a loop they count once."""
        return dict(collections.Counter(sorted(_COLLECTIVE.findall(self.program))))

    def rollout(self, first: np.ndarray, steps: int) -> np.ndarray:
        """Apply the network to its own results.

        Args:
            first: [fields, ..].
            steps: how often.

        Returns:
            [fields, steps + 1, ..], the first one included.
        """
        fields = [first]
        for _ in range(steps):
            fields.append(self.predict(fields[-1]))
        return np.stack(fields, 1)


def taken(analysis: Any) -> int:
    """Bytes of a compiled program on each device, from XLA's memory analysis."""
    return (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        + analysis.temp_size_in_bytes
        - analysis.alias_size_in_bytes
    )


def errors(rollout: np.ndarray, truth: np.ndarray) -> list[float]:
    """The distance from the solver, as a share of the field, after each step.

    Args:
        rollout: [fields, steps, ..].
        truth: the same.

    Returns:
        One number for each step.

    Example:
        >>> errors(np.array([[[3.0], [1.0]]]), np.array([[[3.0], [2.0]]]))
        [0.0, 0.5]
    """
    axes = (0, *range(2, truth.ndim))
    distance = np.sqrt(((rollout - truth) ** 2).sum(axes) / (truth**2).sum(axes))
    return [float(number) for number in distance]
