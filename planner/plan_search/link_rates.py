"""Seconds of collectives, remembered: a search asks for the same ones a million times."""

from __future__ import annotations

from collections.abc import Sequence

from jax.sharding import Mesh

from ..costs import collective_times

_LARGE = 1 << 40


class LinkRates:
    """Seconds of collectives on one mesh: a line for each kind and each set of axes.

    Args:
        mesh: it.

    Example:
        >>> from isoshard.planner.machine.topologies import topology
        >>> mesh = topology("v5e:4x4").mesh((4, 4), ("data", "model"))
        >>> rates = LinkRates(mesh)
        >>> whole = collective_times.seconds("all-gather", 10**8, ("model",), mesh)
        >>> abs(rates.seconds("all-gather", (1,), 1e8) / whole - 1) < 1e-6
        True
    """

    def __init__(self, mesh: Mesh) -> None:
        """Nothing asked yet."""
        self.mesh = mesh
        self.names = tuple(mesh.axis_names)
        self._lines: dict[tuple[str, tuple[int, ...]], tuple[float, float]] = {}

    def seconds(self, kind: str, axes: Sequence[int], sent: float) -> float:
        """How long one collective takes.

        Args:
            kind: as HLO calls it.
            axes: numbers of the mesh axes along which devices talk.
            sent: bytes of its result on one device; of a reduce-scatter of its operand.
        """
        key = (kind, tuple(sorted(axes)))
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = self._line(*key)
        return line[0] + line[1] * sent if sent else 0.0

    def alike(self, one: int, other: int) -> bool:
        """Whether two mesh axes are of one size and equally fast.

        Args:
            one: number of an axis.
            other: of another.
        """
        sizes = tuple(self.mesh.shape.values())
        kinds = ("all-gather", "all-to-all")
        return sizes[one] == sizes[other] and all(
            abs(self.seconds(kind, (one,), 1e9) / self.seconds(kind, (other,), 1e9) - 1) < 1e-6
            for kind in kinds
        )

    def _line(self, kind: str, axes: tuple[int, ...]) -> tuple[float, float]:
        names = tuple(self.names[one] for one in axes)
        first, second = (
            collective_times.seconds(kind, sent, names, self.mesh) for sent in (_LARGE, 2 * _LARGE)
        )
        each = (second - first) / _LARGE
        return max(0.0, first - each * _LARGE), each
