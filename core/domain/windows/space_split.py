"""Operators that read neighbours, on the devices of a mesh, once the compiler has laid arrays out.

`window_operators.apply` has to be given an array's layout. Here the compiler is asked, so that a
program that only says where its inputs are sends rows, forward and backward, where XLA alone
gathers axes:

>>> import jax
>>> from isoshard.core.domain.windows.pool import max_operator
>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.transfer.place import shard
>>> x = shard(jnp.ones((1, 1, 8)), make_mesh((4,), ("x",)), (None, None, "x"))
>>> pool = max_operator(x.dtype, ((3,), (2,), (1,), (1,)), False)
>>> def sent(f):
...     text = jax.jit(f).lower(x).compile().as_text()
...     return [kind for kind in ("all-gather", "collective-permute") if f" {kind}(" in text]
>>> sent(lambda x: by_halos(pool, x)), sent(lambda x: slope_by_halos(pool, by_halos(pool, x), x))
(['collective-permute'], ['collective-permute'])

An axis is read so where its rows and its outputs divide; where not, it is gathered.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
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

from .reach import Operator
from .window_operators import here, on_shards


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def by_halos(operator: Operator, x: Any, *operands: Any) -> Any:
    """What an operator makes of an array.

    Args:
        operator: what to compute.
        x: traced, where `custom_partitioning.possible`.
        *operands: arrays that every device is to have whole (weights).
    """
    return _outputs(operator, x, *operands)


@by_halos.defjvp
def _moved(operator: Operator, xs: tuple[Any, ...], steps: tuple[Any, ...]) -> tuple[Any, Any]:
    return jax.jvp(functools.partial(_whole, operator), xs, steps)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def slope_by_halos(operator: Operator, slope: Any, x: Any, *operands: Any) -> Any:
    """The gradient of what an operator reads.

    Args:
        operator: as for `by_halos`.
        slope: the gradient of its outputs.
        x: what it read.
        *operands: as for `by_halos`.
    """
    return _slopes(operator, slope, x, *operands)


@slope_by_halos.defjvp
def _slope_moved(operator: Operator, xs: tuple[Any, ...], steps: tuple[Any, ...]) -> Any:
    return jax.jvp(functools.partial(_whole_slope, operator), xs, steps)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def operand_slope_by_halos(operator: Operator, slope: Any, x: Any, operand: Any) -> Any:
    """The gradient of the one operand: every device has that of its outputs, and they are added up.

    Args:
        operator: as for `by_halos`.
        slope: the gradient of its outputs.
        x: what it read.
        operand: as for `by_halos`.
    """
    return _operand_slopes(operator, slope, x, operand)


@operand_slope_by_halos.defjvp
def _operand_slope_moved(operator: Operator, xs: tuple[Any, ...], steps: tuple[Any, ...]) -> Any:
    return jax.jvp(functools.partial(_whole_operand_slope, operator), xs, steps)


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
    lies, whole = layout.sharding, _whole_on(mesh)
    return mesh, _local(operator, layout), lies, (lies, *[whole] * len(others))


def _split_slope(operator: Operator, mesh: Mesh, operands: Any, result: Any) -> Any:
    slope, x, *others = operands
    layout = _layout(operator, mesh, x, slope, result)
    lies, whole = layout.sharding, _whole_on(mesh)

    def pulled(local: Callable[..., Any], slope: Any, x: Any, *others: Any) -> Any:
        return jax.vjp(lambda x: local(x, *others), x)[1](slope)[0]

    return mesh, _by_form(operator, 0, layout, pulled), lies, (lies, lies, *[whole] * len(others))


def _split_operand_slope(operator: Operator, mesh: Mesh, operands: Any, result: Any) -> Any:
    slope, x, _ = operands
    layout = _layout(operator, mesh, x, slope)
    lies, whole = layout.sharding, _whole_on(mesh)
    names = [name for own in layout.names for name in own]

    def pulled(local: Callable[..., Any], slope: Any, x: Any, operand: Any) -> Any:
        (own,) = jax.vjp(functools.partial(local, x), operand)[1](slope)
        return lax.psum(own, names) if names else own

    return mesh, _by_form(operator, 1, layout, pulled), whole, (lies, lies, whole)


def _by_form(
    operator: Operator, which: int, layout: ArrayLayout, pulled: Callable[..., Any]
) -> Callable[..., Any]:
    """A gradient, `pulled(local, *operands)`, of the form that suits the platform."""
    usual, form = functools.partial(pulled, _local(operator, layout)), operator.apart[which]
    if form is None:
        return usual
    apart = functools.partial(pulled, _local(dataclasses.replace(operator, local=form), layout))
    return functools.partial(lax.platform_dependent, cpu=apart, default=usual)


def _whole_on(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def _layout(operator: Operator, mesh: Mesh, x: Any, *others: Any) -> ArrayLayout:
    """The layout of `x`, and of outputs with it: its own, and else that of the others."""
    reaches = dict(operator.reaches)
    names: list[tuple[str, ...]] = [()] * len(x.shape)
    used: set[str] = set()
    for of in (x, *others):
        for axis, own in enumerate(map(axis_names, entries_of(of.sharding.spec))):
            count = math.prod(mesh.shape[name] for name in own)
            sizes = [x.shape[axis]]
            sizes += [reaches[axis].outputs(sizes[0])] if axis in reaches else []
            divides = all(size % count == 0 for size in sizes)
            if axis in operator.free or not divides:
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
    tables, shard = on_shards(operator, layout)

    def run(block: Any, *operands: Any) -> Any:
        numbers = [tuple(_own(array, names) for array in arrays) for names, arrays in tables]
        return shard(block, numbers, operands)

    return run


def _own(array: np.ndarray, names: tuple[str, ...]) -> Any:
    """This device's slice of an array."""
    parts = array.reshape(lax.axis_size(names), -1, *array.shape[1:])
    return jnp.asarray(parts)[lax.axis_index(names)]


def _rule(operator: Operator, shapes: tuple[tuple[int, ...], ...]) -> Rule:
    reads, makes, sizes = _axes(operator, shapes[0])
    return f"{', '.join([reads, *_whole_axes(shapes[1:])])} -> {makes}", sizes


def _slope_rule(operator: Operator, shapes: tuple[tuple[int, ...], ...]) -> Rule:
    reads, makes, sizes = _axes(operator, shapes[1])
    return f"{', '.join([makes, reads, *_whole_axes(shapes[2:])])} -> {reads}", sizes


def _operand_slope_rule(operator: Operator, shapes: tuple[tuple[int, ...], ...]) -> Rule:
    reads, makes, sizes = _axes(operator, shapes[1])
    (own,) = _whole_axes(shapes[2:])
    (made,) = _whole_axes(shapes[2:], "w")
    return f"{makes}, {reads}, {own} -> {made}", sizes


def _whole_axes(shapes: Iterable[tuple[int, ...]], name: str = "o") -> list[str]:
    """Axes of operands, which correspond to none."""
    return [
        " ".join(f"{name}{number}_{axis}" for axis in range(len(shape)))
        for number, shape in enumerate(shapes)
    ]


def _axes(operator: Operator, shape: tuple[int, ...]) -> tuple[str, str, dict[str, int]]:
    """Names for the axes that are read and made: rows and outputs at one place are split alike."""
    reaches = dict(operator.reaches)
    reads, makes, sizes = [], [], {}
    for axis, rows in enumerate(shape):
        outputs = reaches[axis].outputs(rows) if axis in reaches else rows
        own, more = f"a{axis}", f"m{axis}"
        read = make = own
        if axis in operator.free:
            make = f"{own}made"
        elif 1 < outputs < rows and rows % outputs == 0:
            read, sizes[more] = f"({own} {more})", rows // outputs
        elif 1 < rows < outputs and outputs % rows == 0:
            make, sizes[more] = f"({own} {more})", outputs // rows
        elif rows != outputs:
            make = f"{own}made"
        reads.append(read)
        makes.append(make)
    return " ".join(reads), " ".join(makes), sizes


_outputs = partitioned(_whole, _split, _rule)
_slopes = partitioned(_whole_slope, _split_slope, _slope_rule)
_operand_slopes = partitioned(_whole_operand_slope, _split_operand_slope, _operand_slope_rule)
