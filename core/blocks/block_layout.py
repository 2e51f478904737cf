"""`BlockLayout`: the layout of an `UnevenArray`, and how to constrain one.

>>> import jax.numpy as jnp
>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.transfer.device_put import shard
>>> rows = np.arange(6, dtype=np.float32)
>>> u = shard(rows, make_mesh((4,), ("x",)), ("x",), uneven="pad", sizes=(1, 2, 0, 3))
>>> layout = BlockLayout.of(u)
>>> layout
BlockLayout(P('x',), (6,) in (12,), sizes ((1, 2, 0, 3),))

Inside a lifted function `lay_in_blocks` is what `with_sharding_constraint` is for equal blocks; the
latter takes an axis out of its blocks, unless it leaves that axis unconstrained. Where nothing is
lifted, `lay_in_blocks` does nothing: an array of the true shape has no padding.

>>> from isoshard.domain import lift
>>> lift(lambda x, y: lay_in_blocks(x + y, layout))(rows, rows).sizes
((1, 2, 0, 3),)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from isoshard.core.deprecations import warn
from isoshard.core.errors import ShardingError
from isoshard.core.frameworks import check_no_tensor
from isoshard.core.layout.axis_types import auto, constrain, is_typed, on_mesh
from isoshard.core.layout.mesh import as_mesh, mesh_of
from isoshard.core.layout.spec import named_sharding, same_layout
from isoshard.core.layout.uneven import Sizes, UnevenArray
from isoshard.core.runtime._jax_internals.jaxpr_classes import JaxprEqn
from isoshard.core.runtime.primitives import new_primitive
from isoshard.core.transfer.host_memory import host_to_jax, narrowed
from isoshard.core.transfer.reshard import reshard_array

from .block_values import Splits, Value
from .chunk_sizes import SizesLike, plan_splits
from .hints import hints_of
from .interpreting import bind, rule
from .packing import kept_sizes, packed, relaid, unpack
from .splits import AxisSplit
from .uneven_values import splits_over


@dataclasses.dataclass(frozen=True)
class BlockLayout:
    """The layout of an `UnevenArray`: equal ones are one key.

    Attributes:
        sharding: of the padded array.
        shape: the true shape.
        padded: the shape of the padded array.
        sizes: the valid elements of each block, per axis; None for an axis without padding.

    Example:
        >>> layout = BlockLayout.plan((6,), jax.make_mesh((4,), ("x",)), ("x",), (1, 2, 0, 3))
        >>> layout.padded, layout.block, layout.sizes
        ((12,), (3,), ((1, 2, 0, 3),))
    """

    sharding: NamedSharding
    shape: tuple[int, ...]
    padded: tuple[int, ...]
    sizes: Sizes

    @staticmethod
    def of(u: UnevenArray) -> BlockLayout:
        """The layout of an array.

        Raises:
            ShardingError: it is on no mesh.
        """
        if not isinstance(u.layout, NamedSharding):
            raise ShardingError(
                f"an UnevenArray of shape {u.shape} has no known mesh; shard "
                "it: iso.reshard(u, mesh, spec)"
            )
        return BlockLayout(u.layout, u.shape, tuple(u.array.shape), u.sizes)

    @staticmethod
    def plan(shape: Sequence[int], mesh: Any, spec: Any, sizes: SizesLike = None) -> Named:
        """The layout of a spec and sizes.

        Args:
            shape: the true shape.
            mesh: the mesh, or what `as_mesh` takes.
            spec: any spelling of a spec; axes need not divide.
            sizes: as for `pack`.

        Returns:
            A BlockLayout; a NamedSharding if no axis needs padding.

        Raises:
            SpecError, UnevenError: as `pack`.
        """
        sharding = named_sharding(spec, as_mesh(mesh), len(shape))
        splits = plan_splits(tuple(shape), sharding, sizes)
        if not any(splits):
            return sharding
        padded = tuple(
            extent if split is None else split.padded
            for extent, split in zip(shape, splits, strict=True)
        )
        valid = tuple(None if split is None else split.sizes for split in splits)
        return BlockLayout(sharding, tuple(shape), padded, valid)

    def resharded(self, spec: Any, mesh: Any = None) -> Named:
        """The layout of another spec; sizes remain where there are as many blocks.

        Args:
            spec: any spelling of a spec.
            mesh: the new mesh; by default its own.

        Returns:
            A BlockLayout; a NamedSharding if no axis needs padding.

        Raises:
            SpecError: the spec does not fit.
        """
        mesh = mesh_of(self.sharding) if mesh is None else as_mesh(mesh)
        sharding = named_sharding(spec, mesh, len(self.shape))
        return BlockLayout.plan(self.shape, mesh, spec, kept_sizes(self.sizes, sharding))

    @property
    def is_even(self) -> bool:
        """Whether nothing is padded."""
        return self.padded == self.shape

    @property
    def block(self) -> tuple[int, ...]:
        """The shape of one device's buffer."""
        return self.sharding.shard_shape(self.padded)

    @property
    def splits(self) -> Splits:
        """One `AxisSplit` per axis, None for those without padding."""
        return splits_over(self.sizes, self.padded, self.sharding)

    def is_equivalent_to(self, other: BlockLayout) -> bool:
        """Whether an array of either layout has the same elements at the same positions."""
        blocks = (self.padded, self.sizes) == (other.padded, other.sizes)
        return blocks and same_layout(self.sharding, other.sharding, len(self.shape))

    def alike(self, other: BlockLayout) -> bool:
        """The old name of `is_equivalent_to`."""
        warn("BlockLayout.alike", "BlockLayout.is_equivalent_to", stacklevel=2)
        return self.is_equivalent_to(other)

    def wrap(self, array: Any) -> UnevenArray:
        """A padded array of this layout, as an `UnevenArray`."""
        return UnevenArray(array, self.shape, self.sizes, self.sharding)

    def on(self, sharding: NamedSharding) -> BlockLayout:
        """The same blocks over the axes of another mesh of the same devices."""
        return dataclasses.replace(self, sharding=sharding)

    def __repr__(self) -> str:
        """Spec, shapes and sizes."""
        return (
            f"BlockLayout({self.sharding.spec}, {self.shape} in {self.padded}, sizes {self.sizes})"
        )


Named = NamedSharding | BlockLayout
Layout = Sharding | BlockLayout


def lay_out_in_blocks(x: Any, layout: Layout) -> Any:
    """Shard a concrete array, in blocks or not.

    Args:
        x: a NumPy array, a jax.Array of the true shape, or an UnevenArray. A NumPy array of 64
            bits while `jax_enable_x64` is off: as for `iso.shard`.
        layout: a BlockLayout; or a sharding that divides the true shape.

    Returns:
        An UnevenArray for a BlockLayout, else a jax.Array.

    Raises:
        ShardingError: the layout is of another shape.
        CopyError: an integer does not fit into 32 bits, and JAX has no 64.

    Example:
        >>> layout = BlockLayout.plan((6,), jax.make_mesh((4,), ("x",)), ("x",), (1, 2, 0, 3))
        >>> lay_out_in_blocks(np.arange(6, dtype=np.float32), layout).array.tolist()
        [0.0, 0.0, 0.0, 1.0, 2.0, 0.0, 0.0, 0.0, 0.0, 3.0, 4.0, 5.0]
    """
    check_no_tensor(x, "lay_out_in_blocks")
    if isinstance(x, np.ndarray):
        x = narrowed(x, None, "array")
    if not isinstance(layout, BlockLayout):
        if isinstance(x, UnevenArray) and isinstance(layout, NamedSharding):
            return relaid(x, layout, (None,) * x.ndim)
        if isinstance(x, np.ndarray):
            return host_to_jax(x, layout)
        return reshard_array(unpack(x) if isinstance(x, UnevenArray) else x, layout)
    _check_shape(x, layout)
    if isinstance(x, UnevenArray):
        return relaid(x, layout.sharding, layout.splits)
    return layout.wrap(packed(x, layout.splits, layout.sharding, "array"))


def _check_shape(x: Any, layout: BlockLayout) -> None:
    if tuple(x.shape) != layout.shape:
        raise ShardingError(
            f"a value of shape {x.shape} cannot be in the blocks of shape {layout.shape}, sizes "
            f"{layout.sizes}; pass the layout of an array of its shape"
        )


def without_padding(u: UnevenArray) -> np.ndarray:
    """A copy of the valid elements on the host; no device gathers anything.

    Args:
        u: concrete, and wholly in this process.

    Returns:
        An array of the true shape.

    Example:
        >>> without_padding(UnevenArray(jax.numpy.arange(4), (3,), ((1, 2),)))
        array([0, 2, 3], dtype=int32)
    """
    check_no_tensor(u, "without_padding")
    valid: Splits = tuple(
        None if size is None else AxisSplit(size, extent // len(size))
        for size, extent in zip(u.sizes, u.array.shape, strict=True)
    )
    lines = [
        np.arange(extent) if split is None else split.positions()
        for split, extent in zip(valid, u.shape, strict=True)
    ]
    return np.asarray(u.array)[np.ix_(*lines)]


def lay_in_blocks(x: Any, layout: Layout) -> Any:
    """Constrain a value, inside a lifted function, to given blocks.

    Args:
        x: traced, of the true shape of the layout.
        layout: a BlockLayout, or a NamedSharding for equal blocks.

    Returns:
        The same value. Outside of lifted functions a BlockLayout constrains nothing.

    Raises:
        ShardingError: the layout is of another shape.

    Example:
        >>> from isoshard.domain import lift
        >>> layout = BlockLayout.plan((5,), jax.make_mesh((4,), ("x",)), ("x",))
        >>> lift(lambda x: lay_in_blocks(x + 1, layout))(jax.numpy.zeros(5)).sizes
        ((2, 2, 1, 0),)
    """
    if not isinstance(layout, BlockLayout):
        return constrain(x, layout)
    _check_shape(x, layout)
    sharding = on_mesh(layout.sharding, auto(layout.sharding.mesh))
    return _lay_in_blocks_p.bind(x, layout=layout.on(sharding))


_lay_in_blocks_p = new_primitive(
    "lay_in_blocks",
    lambda x, *, layout: x,
    lambda x, *, layout: x.update(weak_type=False),
    transpose=lambda cotangent, x, *, layout: [_lay_in_blocks_p.bind(cotangent, layout=layout)],
)


@rule("lay_in_blocks", always=True)
def in_blocks(eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """In the blocks of the layout; other axes have its sharding."""
    (value,) = values
    layout: BlockLayout = eqn.params["layout"]
    result = value.with_splits(layout.splits)
    array = jax.lax.with_sharding_constraint(result.array, layout.sharding)
    hints = hints_of(layout.sharding, len(layout.shape))
    return [dataclasses.replace(result, array=array, hints=hints)]


@rule("sharding_constraint")
def constrained(eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """A constrained axis is unpacked; others are unchanged."""
    (value,) = values
    sharding = eqn.params["sharding"]
    free = set(eqn.params["unconstrained_dims"])
    if isinstance(sharding, NamedSharding):
        spec = tuple(sharding.spec)
        free |= {axis for axis, entry in enumerate(spec) if entry is P.UNCONSTRAINED}
    value = value.unpacked([axis for axis in range(len(value.splits)) if axis not in free])
    (array,) = bind(eqn, [value.array])
    constraint_hints = hints_of(sharding, len(value.splits))
    hints = [
        value.hints[axis] if axis in free else hint for axis, hint in enumerate(constraint_hints)
    ]
    return [dataclasses.replace(value, array=array, hints=tuple(hints))]


@rule("reshard", always=True)
def resharded(eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """As a constraint of every axis; to Auto axes it changes a type alone, and values have none."""
    (value,) = values
    sharding = eqn.params["dst_sharding"]
    if not is_typed(sharding.mesh):
        return values
    sharding = on_mesh(sharding, auto(sharding.mesh))
    value = value.unpacked()
    array = jax.lax.with_sharding_constraint(value.array, sharding)
    hints = hints_of(sharding, len(value.splits))
    return [dataclasses.replace(value, array=array, hints=hints)]
