"""Operators that read neighbours, on the devices of a mesh, once the compiler has laid arrays out.

`window_operators.apply` has to be given an array's layout. Here the compiler is asked, so that a
program that only says where its inputs are sends rows, forward and backward, where XLA alone
gathers axes:

>>> import jax
>>> from isoshard.core.domain.windows.pool import max_operator
>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.transfer.device_put import shard
>>> x = shard(jnp.ones((1, 1, 8)), make_mesh((4,), ("x",)), (None, None, "x"))
>>> pool = max_operator(x.dtype, ((3,), (2,), (1,), (1,)), False)
>>> def sent(f):
...     text = jax.jit(f).lower(x).compile().as_text()
...     return [kind for kind in ("all-gather", "collective-permute") if f" {kind}(" in text]
>>> sent(lambda x: by_halos(pool, x)), sent(lambda x: slope_by_halos(pool, by_halos(pool, x), x))
(['collective-permute'], ['collective-permute'])

An axis is read so where its rows and its outputs divide; where not, it is gathered. Channels of a
convolution in groups may be split, too, so that each device has some of the groups.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from isoshard.core.domain.blocks.array_layout import ArrayLayout, whole_layout
from isoshard.core.layout.custom_partitioning import Rule, partitioned
from isoshard.core.layout.spec import axis_names
from isoshard.core.layout.spec_entries import entries_of
from isoshard.core.layout.split_operator import Pulls

from .reach import Operator
from .window_operators import here, on_shards


def by_halos(operator: Operator, x: Any, *operands: Any) -> Any:
    """What an operator makes of an array.

    Args:
        operator: what to compute.
        x: traced, where `custom_partitioning.possible`.
        *operands: arrays that every device is to have whole (weights), or for its groups.
    """
    return _outputs(operator, x, *operands)


def slope_by_halos(operator: Operator, slope: Any, x: Any, *operands: Any) -> Any:
    """The gradient of what an operator reads.

    Args:
        operator: as for `by_halos`.
        slope: the gradient of its outputs.
        x: what it read.
        *operands: as for `by_halos`.
    """
    return _slopes(operator, slope, x, *operands)


def operand_slope_by_halos(operator: Operator, slope: Any, x: Any, operand: Any) -> Any:
    """The gradient of the one operand: every device has that of its outputs, and they are added up.

    Args:
        operator: as for `by_halos`.
        slope: the gradient of its outputs.
        x: what it read.
        operand: as for `by_halos`.
    """
    return _operand_slopes(operator, slope, x, operand)


@functools.partial(jax.jit, static_argnums=0)  # tables of numbers may not stand by themselves
def _whole(operator: Operator, x: Any, *operands: Any) -> Any:
    return here(operator, whole_layout(x.shape), x, *operands)


@functools.partial(jax.jit, static_argnums=0)
def _whole_slope(operator: Operator, slope: Any, x: Any, *operands: Any) -> Any:
    return jax.vjp(lambda x: _whole(operator, x, *operands), x)[1](slope)[0]


@functools.partial(jax.jit, static_argnums=0)
def _whole_operand_slope(operator: Operator, slope: Any, x: Any, operand: Any) -> Any:
    return jax.vjp(functools.partial(_whole, operator, x), operand)[1](slope)[0]


def _split(operator: Operator, mesh: Mesh, operands: Any, result: Any) -> Any:
    x, *others = operands
    layout = _layout(operator, mesh, x, result)
    lies, whole = layout.sharding, _operand_on(operator, layout)
    return mesh, _local(operator, layout), lies, (lies, *[whole] * len(others))


def _split_slope(operator: Operator, mesh: Mesh, operands: Any, result: Any) -> Any:
    slope, x, *others = operands
    layout = _layout(operator, mesh, x, slope, result)
    lies, whole = layout.sharding, _operand_on(operator, layout)

    def pulled(local: Callable[..., Any], slope: Any, x: Any, *others: Any) -> Any:
        return jax.vjp(lambda x: local(x, *others), x)[1](slope)[0]

    return mesh, _by_form(operator, 0, layout, pulled), lies, (lies, lies, *[whole] * len(others))


def _split_operand_slope(operator: Operator, mesh: Mesh, operands: Any, result: Any) -> Any:
    slope, x, _ = operands
    layout = _layout(operator, mesh, x, slope)
    lies, own = layout.sharding, _operand_on(operator, layout)
    summed = [axis for axis in range(len(x.shape)) if axis not in operator.free]
    names = [name for axis in summed for name in layout.names[axis]]

    def pulled(local: Callable[..., Any], slope: Any, x: Any, operand: Any) -> Any:
        (here,) = jax.vjp(functools.partial(local, x), operand)[1](slope)
        return lax.psum(here, names) if names else here

    return mesh, _by_form(operator, 1, layout, pulled), own, (lies, lies, own)


def _by_form(
    operator: Operator, which: int, layout: ArrayLayout, pulled: Callable[..., Any]
) -> Callable[..., Any]:
    """A gradient, `pulled(local, *operands)`, of the form that suits the platform."""
    usual, form = functools.partial(pulled, _local(operator, layout)), operator.apart[which]
    if form is None or _on_each(operator, layout).groups == 1:
        return usual
    apart = functools.partial(pulled, _local(dataclasses.replace(operator, local=form), layout))
    return functools.partial(lax.platform_dependent, cpu=apart, default=usual)


def _operand_on(operator: Operator, layout: ArrayLayout) -> NamedSharding:
    """Where an operand is whole, but for the groups of other devices."""
    names = [name for axis in operator.free for name in layout.names[axis]]
    return NamedSharding(layout.mesh, PartitionSpec(tuple(names) or None))


def _on_each(operator: Operator, layout: ArrayLayout) -> Operator:
    """The operator for the groups of one device."""
    count = math.prod(len(layout.sizes[axis]) for axis in operator.free)
    return operator.of_groups(operator.groups // count)


def _layout(operator: Operator, mesh: Mesh, x: Any, *others: Any) -> ArrayLayout:
    """The layout of `x`, and of outputs with it: its own, and else that of the others."""
    reaches = dict(operator.reaches)
    names: list[tuple[str, ...]] = [()] * len(x.shape)
    used: set[str] = set()
    for of in (x, *others):
        for axis, own in enumerate(map(axis_names, entries_of(of.sharding.spec))):
            sizes = [x.shape[axis]]
            sizes += [reaches[axis].outputs(sizes[0])] if axis in reaches else []
            if axis in operator.free:  # no device computes a part of a group
                sizes = [operator.groups]
                while operator.groups % math.prod(mesh.shape[name] for name in own):
                    own = own[:-1]
            count = math.prod(mesh.shape[name] for name in own)
            if any(size % count for size in sizes):
                continue
            if own and not names[axis] and not used & {*own}:
                names[axis] = own
                used |= {*own}
    counts = [math.prod(mesh.shape[name] for name in own) for own in names]
    blocks = tuple(size // count for size, count in zip(x.shape, counts, strict=True))
    sizes = tuple((block,) * count for block, count in zip(blocks, counts, strict=True))
    return ArrayLayout(mesh, tuple(names), sizes, blocks, False)


def _local(operator: Operator, layout: ArrayLayout) -> Callable[..., Any]:
    """What a device makes of its shard."""
    tables, shard = on_shards(_on_each(operator, layout), layout)

    def run(block: Any, *operands: Any) -> Any:
        numbers = [tuple(_own(array, names) for array in arrays) for names, arrays in tables]
        return shard(block, numbers, operands)

    return run


def _own(array: np.ndarray, names: tuple[str, ...]) -> Any:
    """This device's slice of an array."""
    parts = array.reshape(lax.axis_size(names), -1, *array.shape[1:])
    return jnp.asarray(parts)[lax.axis_index(names)]


def _rule(operator: Operator, shapes: tuple[tuple[int, ...], ...]) -> Rule:
    x, *others = shapes
    reads, makes, operands, sizes = _axes(operator, x, others)
    return f"{', '.join([reads, *operands])} -> {makes}", sizes


def _slope_rule(operator: Operator, shapes: tuple[tuple[int, ...], ...]) -> Rule:
    _, x, *others = shapes
    reads, makes, operands, sizes = _axes(operator, x, others)
    return f"{', '.join([makes, reads, *operands])} -> {reads}", sizes


def _operand_slope_rule(operator: Operator, shapes: tuple[tuple[int, ...], ...]) -> Rule:
    _, x, *others = shapes
    reads, makes, (own,), sizes = _axes(operator, x, others)
    made = own.replace("o0", "w0")  # the gradient need not be split as the operand is
    sizes |= {name.replace("o0", "w0"): size for name, size in sizes.items()}
    return f"{makes}, {reads}, {own} -> {made}", sizes


def _axes(
    operator: Operator, shape: tuple[int, ...], operands: Sequence[tuple[int, ...]]
) -> tuple[str, str, list[str], dict[str, int]]:
    """Names for the axes that are read and made, and of operands; sizes of factors of axes.

    Rows and outputs at one place are split alike, and so are the groups of an axis; other axes of
    operands correspond to none.
    """
    reaches = dict(operator.reaches)
    reads, makes, sizes = [], [], dict[str, int]()

    def in_groups(name: str, size: int) -> str:
        if operator.groups in (1, size):
            return name if operator.groups == 1 else "g"
        sizes[name] = size // operator.groups
        return f"(g {name})"

    for axis, rows in enumerate(shape):
        outputs = reaches[axis].outputs(rows) if axis in reaches else rows
        own, more = f"a{axis}", f"m{axis}"
        read = make = own
        if axis in operator.free:
            read, make = in_groups(own, rows), in_groups(f"{own}made", operands[0][0])
        elif 1 < outputs < rows and rows % outputs == 0:
            read, sizes[more] = f"({own} {more})", rows // outputs
        elif 1 < rows < outputs and outputs % rows == 0:
            make, sizes[more] = f"({own} {more})", outputs // rows
        elif rows != outputs:
            make = f"{own}made"
        reads.append(read)
        makes.append(make)
    others = [
        [f"o{number}_{axis}" for axis in range(len(own))] for number, own in enumerate(operands)
    ]
    if operator.groups > 1:
        others[0][0] = in_groups(others[0][0], operands[0][0])
    if "g" not in (*reads, *makes, *(name for names in others for name in names)):
        sizes |= {"g": operator.groups} if operator.groups > 1 else {}
    return " ".join(reads), " ".join(makes), list(map(" ".join, others)), sizes


def _pulls(operator: Operator) -> Pulls | None:
    """Of a convolution, whose three functions are the transpositions of each other."""
    if not operator.free:
        return None
    return (
        lambda slope, x, kernel: _slopes(operator, slope, x, kernel),
        lambda slope, x, kernel: _operand_slopes(operator, slope, x, kernel),
    )


def _slope_pulls(operator: Operator) -> Pulls | None:
    if not operator.free:
        return None
    return (
        lambda moved, slope, x, kernel: _outputs(operator, moved, kernel),
        None,
        lambda moved, slope, x, kernel: _operand_slopes(operator, slope, moved, kernel),
    )


def _operand_slope_pulls(operator: Operator) -> Pulls | None:
    return (
        lambda moved, slope, x, kernel: _outputs(operator, x, moved),
        lambda moved, slope, x, kernel: _slopes(operator, slope, x, moved),
        None,
    )


_outputs = partitioned(_whole, _split, _rule, _pulls)
_slopes = partitioned(_whole_slope, _split_slope, _slope_rule, _slope_pulls)
_operand_slopes = partitioned(
    _whole_operand_slope, _split_operand_slope, _operand_slope_rule, _operand_slope_pulls
)
