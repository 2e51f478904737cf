"""Mesh axes as their prime parts: eight heads are split by eight of sixteen devices.

A plan names whole axes. What it gives a parameter spreads to values whose axes are smaller, and
XLA's partitioner splits those by as many parts as divide them.

>>> from isoshard.planner.machine.topologies import topology
>>> parts = AxisParts(topology("v5e:16x16").mesh((64, 4), ("data", "model")))
>>> parts.of, parts.sizes
(((0, 1, 2, 3, 4, 5), (6, 7)), (2, 2, 2, 2, 2, 2, 2, 2))
>>> parts.split(((1,), (), (0,)))
((6, 7), (), (0, 1, 2, 3, 4, 5))
>>> parts.joined(((6, 7), ())), parts.joined(((6,), (7,)))
(((1,), ()), None)
"""

from __future__ import annotations

from collections.abc import Iterable

from jax.sharding import Mesh

from ..axes.factor_layouts import ArrayLayout
from ..axes.spreading import ArrayLayouts


class AxisParts:
    """The parts of the axes of one mesh.

    Args:
        mesh: it.

    Attributes:
        sizes: of each part.
        of: the parts of each mesh axis, the outermost first; an axis of one device has none.
    """

    def __init__(self, mesh: Mesh) -> None:
        """Numbered in the mesh's order."""
        layouts = ArrayLayouts(dict(mesh.shape))
        self.sizes = layouts.sizes
        self.of = tuple([layouts.parts(name) for name in mesh.axis_names])
        self._owners = [number for number, parts in enumerate(self.of) for _ in parts]

    def axes(self, parts: Iterable[int]) -> tuple[int, ...]:
        """Numbers of the mesh axes that some parts are of, each once.

        Args:
            parts: their numbers.
        """
        return tuple(dict.fromkeys([self._owners[one] for one in parts]))

    def split(self, layout: ArrayLayout) -> ArrayLayout:
        """A layout by parts.

        Args:
            layout: by mesh axes.
        """
        return tuple([tuple([one for n in split for one in self.of[n]]) for split in layout])

    def joined(self, layout: ArrayLayout) -> ArrayLayout | None:
        """A layout by mesh axes; None: it splits by a part of one, which no spec says.

        Args:
            layout: by parts.
        """
        whole = tuple([self.axes(split) for split in layout])
        return whole if self.split(whole) == layout else None
