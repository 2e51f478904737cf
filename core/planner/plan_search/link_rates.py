"""Seconds of collectives, remembered: a search asks for the same ones a million times."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jax.sharding import Mesh

from ..machine.topologies import topology_of

_SHARE = {"all-reduce": 2.0, "all-gather": 1.0, "reduce-scatter": 1.0, "all-to-all": 0.25}


class LinkRates:
    """Seconds of collectives on one mesh.

    Args:
        mesh: it.
    """

    def __init__(self, mesh: Mesh) -> None:
        """Nothing asked yet."""
        self.mesh = mesh
        self.names = tuple(mesh.axis_names)
        self.sizes = tuple(mesh.shape[name] for name in self.names)
        self._lines: dict[tuple[str, tuple[int, ...]], tuple[float, float]] = {}

    def seconds(self, kind: str, axes: Sequence[int], sent: float) -> float:
        """How long one collective takes.

        Args:
            kind: as HLO calls it.
            axes: numbers of the mesh axes along which devices talk.
            sent: bytes of its result on one device; of a reduce-scatter of its operand.
        """
        key = (kind, tuple(sorted(axes)))
        if key not in self._lines:
            self._lines[key] = self._line(*key)
        fixed, each = self._lines[key]
        return fixed + each * sent

    def _line(self, kind: str, axes: tuple[int, ...]) -> tuple[float, float]:
        chip = topology_of(self.mesh).chip
        count = math.prod(self.sizes[one] for one in axes)
        links = 2 if chip.links else 1
        rate = chip.link * links
        share = _SHARE.get(kind, 1.0) * (count - 1) / count
        return chip.latency * math.log2(max(2, count)), share / rate
