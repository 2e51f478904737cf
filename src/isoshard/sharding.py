"""Shardings in their several notations: specs, tiles, OpSharding strings, types, local shards.

>>> import isoshard as iso
>>> mesh = iso.make_mesh((2, 4), ("x", "y"))
>>> iso.sharding.normalize_spec(("x",), mesh, 2)
P('x',)
>>> iso.sharding.parse_op_sharding("{devices=[2,1]0,1}").blocks
(2, 1)
"""

from isoshard.core.layout.axis_types import typeof
from isoshard.core.layout.mesh_slices import slice_axes
from isoshard.core.layout.op_sharding import parse_op_sharding, to_op_sharding
from isoshard.core.layout.shards import Shard
from isoshard.core.layout.spec import normalize_spec
from isoshard.core.layout.tiles import Tiles

__all__ = [
    "Shard",
    "Tiles",
    "normalize_spec",
    "parse_op_sharding",
    "slice_axes",
    "to_op_sharding",
    "typeof",
]


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
