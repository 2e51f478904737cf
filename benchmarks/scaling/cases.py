"""What a case of the scaling table is, and arrays that have a layout and no values.

A field has 4 channels and 8 columns in float32; its rows are split, so a row is 128 bytes. Uneven
blocks have one row more and one row less by turns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import isoshard as iso

AXIS = "x"
CHANNELS, COLUMNS = 4, 8
ROW = CHANNELS * COLUMNS * 4  # bytes of a row of the field
ROWS = 2  # the axis of the field that is split

SPLITS = ("even", "windows", "xla", "uneven")
"""Even blocks, by `method="auto"`; the same by the two other methods; uneven ones."""

WAYS = ("forward", "backward")


class Size(NamedTuple):
    """How large a case is.

    Attributes:
        devices: how many, an even number.
        rows: of each block, on average.
        split: one of `SPLITS`.
    """

    devices: int
    rows: int
    split: str = "even"

    @property
    def uneven(self) -> bool:
        """Whether blocks have one row more and one less by turns."""
        return self.split == "uneven"

    @property
    def block(self) -> int:
        """Rows of a block, padding included."""
        return self.rows + self.uneven

    @property
    def sides(self) -> int:
        """Neighbours of the device that has the most of them."""
        return min(2, self.others)

    @property
    def others(self) -> int:
        """How many other devices there are."""
        return self.devices - 1

    @property
    def share(self) -> float:
        """The part of an array that is on the other devices."""
        return self.others / self.devices


Bytes = Callable[[Size], float]


@dataclasses.dataclass(frozen=True)
class Case:
    """An operator, and what it should send.

    Attributes:
        name: for the table.
        make: of a mesh and a size, the function and its arguments.
        forward: bytes that a device receives, on paper.
        backward: likewise in the gradient, on top of the forward pass.
        labels: both in words, for the table.
        splits: those of `SPLITS` that it is tried on.
        grows: whether what is sent grows with the block, so that strong scaling is another thing.
        most: devices, at most, that it is compiled for on uneven blocks, where programs grow with
            their number.
        differs: why compiled programs send something else than the formula says, by split and
            pass, "forward" or "backward".
    """

    name: str
    make: Callable[[Mesh, Size], tuple[Callable[..., Any], tuple[Any, ...]]]
    forward: Bytes
    backward: Bytes
    labels: tuple[str, str]
    splits: tuple[str, ...] = ("even", "uneven")
    grows: bool = False
    most: int = 512
    differs: Mapping[tuple[str, str], str] = dataclasses.field(default_factory=dict)


def array(mesh: Mesh, size: Size, before: tuple[int, ...], after: tuple[int, ...]) -> Any:
    """An array without values, float32, one axis of it split.

    Args:
        mesh: of one axis.
        size: of the split axis.
        before: extents of the axes before it.
        after: of those after it.

    Returns:
        A ShapeDtypeStruct; an UnevenArray around one if the size is uneven.
    """
    axes = len(before) + 1 + len(after)
    layout = NamedSharding(mesh, P(*[None] * len(before), AXIS))
    shape = (*before, size.devices * size.block, *after)
    struct = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=layout)
    if not size.uneven:
        return struct
    true = (*before, size.devices * size.rows, *after)
    blocks: list[Any] = [None] * axes
    blocks[len(before)] = (size.rows + 1, size.rows - 1) * (size.devices // 2)
    return iso.UnevenArray(struct, true, blocks, layout)


def field(mesh: Mesh, size: Size) -> Any:
    """A field, float32[1, channels, rows, columns]."""
    return array(mesh, size, (1, CHANNELS), (COLUMNS,))


def replicated(mesh: Mesh, *shape: int) -> Any:
    """An array that every device has whole."""
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P()))


def programs(case: Case, size: Size) -> tuple[str, str]:
    """Compile a case.

    Args:
        case: what to compile.
        size: for how many devices, and how large.

    Returns:
        The HLO of the forward pass, and that of the gradients of a sum of squares by all arguments,
        which lie as these do; the forward pass is part of it.
    """
    mesh = iso.make_mesh((size.devices,), (AXIS,))
    function, arguments = case.make(mesh, size)

    def loss(arguments: tuple[Any, ...]) -> Any:
        results = jax.tree.leaves(function(*arguments), is_leaf=_uneven)
        real = [result for result in results if jnp.issubdtype(result.dtype, jnp.floating)]
        return sum(map(_squares, real))

    layouts = jax.tree.map(lambda leaf: leaf.sharding, arguments)
    forward = jax.jit(function).lower(*arguments)
    backward = jax.jit(jax.grad(loss), out_shardings=layouts).lower(arguments)
    return forward.compile().as_text(), backward.compile().as_text()


def _uneven(value: Any) -> bool:
    return isinstance(value, iso.UnevenArray)


def _squares(value: Any) -> Any:
    array = jnp.where(value.mask(), value.array, 0) if _uneven(value) else value
    return (array**2).sum()
