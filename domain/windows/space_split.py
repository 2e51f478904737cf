"""Operators that read neighbours, partitioned when they are compiled.

`window_operators.apply` takes an array's sharding. Here the compiler provides it, so that a
program that only shards its inputs sends rows, forward and backward, where XLA alone
gathers axes:

>>> import jax
>>> from isoshard.domain.windows.pool import max_operator
>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.transfer.device_put import shard
>>> x = shard(jnp.ones((1, 1, 8)), make_mesh((4,), ("x",)), (None, None, "x"))
>>> pool = max_operator(x.dtype, ((3,), (2,), (1,), (1,)), False)
>>> def sent(f):
...     text = jax.jit(f).lower(x).compile().as_text()
...     return [kind for kind in ("all-gather", "collective-permute") if f" {kind}(" in text]
>>> sent(lambda x: by_halos(pool, x))
['collective-permute']
>>> sent(lambda x: cotangent_by_halos(pool, by_halos(pool, x), x))
['collective-permute']

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

from isoshard.core.kit import ArrayLayout, Pulls, Rule, entries_of, partitioned, unsplit_layout
from isoshard.core.kit import spec_axis_names as axis_names

from .reach import Operator
from .window_operators import apply_full, on_shards


def by_halos(operator: Operator, x: Any, *operands: Any) -> Any:
    """The outputs of an operator."""
    return _outputs(operator, x, *operands)


def cotangent_by_halos(operator: Operator, cotangent: Any, x: Any, *operands: Any) -> Any:
    """The cotangent of an operator's input."""
    return _cotangents(operator, cotangent, x, *operands)


def operand_cotangent_by_halos(operator: Operator, cotangent: Any, x: Any, operand: Any) -> Any:
    """The cotangent of the one operand, summed over devices."""
    return _operand_cotangents(operator, cotangent, x, operand)


@functools.partial(jax.jit, static_argnums=0)  # tables are constants of the program, not arguments
def _unsharded(operator: Operator, x: Any, *operands: Any) -> Any:
    return apply_full(operator, unsplit_layout(x.shape), x, *operands)


@functools.partial(jax.jit, static_argnums=0)
def _unsharded_cotangent(operator: Operator, cotangent: Any, x: Any, *operands: Any) -> Any:
    return jax.vjp(lambda x: _unsharded(operator, x, *operands), x)[1](cotangent)[0]


@functools.partial(jax.jit, static_argnums=0)
def _unsharded_operand_cotangent(operator: Operator, cotangent: Any, x: Any, operand: Any) -> Any:
    return jax.vjp(functools.partial(_unsharded, operator, x), operand)[1](cotangent)[0]


def _split(operator: Operator, mesh: Mesh, operands: Any, result: Any) -> Any:
    x, *others = operands
    layout = _layout(operator, mesh, x, result)
    sharding, operand_sharding = layout.sharding, _operand_on(operator, layout)
    return mesh, _local(operator, layout), sharding, (sharding, *[operand_sharding] * len(others))


def _split_cotangent(operator: Operator, mesh: Mesh, operands: Any, result: Any) -> Any:
    cotangent, x, *others = operands
    layout = _layout(operator, mesh, x, cotangent, result)
    sharding, operand_sharding = layout.sharding, _operand_on(operator, layout)

    def pulled(local: Callable[..., Any], cotangent: Any, x: Any, *others: Any) -> Any:
        return jax.vjp(lambda x: local(x, *others), x)[1](cotangent)[0]

    return (
        mesh,
        _by_form(operator, 0, layout, pulled),
        sharding,
        (sharding, sharding, *[operand_sharding] * len(others)),
    )


def _split_operand_cotangent(operator: Operator, mesh: Mesh, operands: Any, result: Any) -> Any:
    cotangent, x, _ = operands
    layout = _layout(operator, mesh, x, cotangent)
    sharding, operand_sharding = layout.sharding, _operand_on(operator, layout)
    summed = [axis for axis in range(len(x.shape)) if axis not in operator.free]
    names = [name for axis in summed for name in layout.names[axis]]

    def pulled(local: Callable[..., Any], cotangent: Any, x: Any, operand: Any) -> Any:
        (gradient,) = jax.vjp(functools.partial(local, x), operand)[1](cotangent)
        return lax.psum(gradient, names) if names else gradient

    return (
        mesh,
        _by_form(operator, 1, layout, pulled),
        operand_sharding,
        (sharding, sharding, operand_sharding),
    )


def _by_form(
    operator: Operator, which: int, layout: ArrayLayout, pulled: Callable[..., Any]
) -> Callable[..., Any]:
    """A gradient, `pulled(local, *operands)`, of the form that suits the platform."""
    usual, form = functools.partial(pulled, _local(operator, layout)), operator.per_group[which]
    if form is None or _on_each(operator, layout).groups == 1:
        return usual
    by_groups = functools.partial(pulled, _local(dataclasses.replace(operator, local=form), layout))
    return functools.partial(lax.platform_dependent, cpu=by_groups, default=usual)


def _operand_on(operator: Operator, layout: ArrayLayout) -> NamedSharding:
    """The sharding of an operand: unsplit, but for the groups of other devices."""
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
        for axis, axes in enumerate(map(axis_names, entries_of(of.sharding.spec))):
            sizes = [x.shape[axis]]
            sizes += [reaches[axis].outputs(sizes[0])] if axis in reaches else []
            if axis in operator.free:  # no device computes a fraction of a group
                sizes = [operator.groups]
                while operator.groups % math.prod(mesh.shape[name] for name in axes):
                    axes = axes[:-1]
            count = math.prod(mesh.shape[name] for name in axes)
            if any(size % count for size in sizes):
                continue
            if axes and not names[axis] and not used & {*axes}:
                names[axis] = axes
                used |= {*axes}
    counts = [math.prod(mesh.shape[name] for name in axes) for axes in names]
    blocks = tuple(size // count for size, count in zip(x.shape, counts, strict=True))
    sizes = tuple((block,) * count for block, count in zip(blocks, counts, strict=True))
    return ArrayLayout(mesh, tuple(names), sizes, blocks, False)


def _local(operator: Operator, layout: ArrayLayout) -> Callable[..., Any]:
    """The per-device function."""
    tables, shard = on_shards(_on_each(operator, layout), layout)

    def run(block: Any, *operands: Any) -> Any:
        local_tables = [
            tuple(_local_slice(array, names) for array in arrays) for names, arrays in tables
        ]
        return shard(block, local_tables, operands)

    return run


def _local_slice(array: np.ndarray, names: tuple[str, ...]) -> Any:
    """This device's slice of an array."""
    slices = array.reshape(lax.axis_size(names), -1, *array.shape[1:])
    return jnp.asarray(slices)[lax.axis_index(names)]


def _rule(operator: Operator, shapes: tuple[tuple[int, ...], ...]) -> Rule:
    x, *others = shapes
    reads, makes, operands, sizes = _axes(operator, x, others)
    return f"{', '.join([reads, *operands])} -> {makes}", sizes


def _cotangent_rule(operator: Operator, shapes: tuple[tuple[int, ...], ...]) -> Rule:
    _, x, *others = shapes
    reads, makes, operands, sizes = _axes(operator, x, others)
    return f"{', '.join([makes, reads, *operands])} -> {reads}", sizes


def _operand_cotangent_rule(operator: Operator, shapes: tuple[tuple[int, ...], ...]) -> Rule:
    _, x, *others = shapes
    reads, makes, (operand,), sizes = _axes(operator, x, others)
    result = operand.replace("o0", "w0")  # the gradient need not be split as the operand is
    sizes |= {name.replace("o0", "w0"): size for name, size in sizes.items()}
    return f"{makes}, {reads}, {operand} -> {result}", sizes


def _axes(
    operator: Operator, shape: tuple[int, ...], operands: Sequence[tuple[int, ...]]
) -> tuple[str, str, list[str], dict[str, int]]:
    """Names for the axes of inputs, outputs and operands; sizes of factors of axes.

    Rows and outputs at one position are sharded identically, and so are the groups of an axis;
    other axes of operands correspond to none.
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
        name, factor_name = f"a{axis}", f"m{axis}"
        read = make = name
        if axis in operator.free:
            read, make = in_groups(name, rows), in_groups(f"{name}made", operands[0][0])
        elif 1 < outputs < rows and rows % outputs == 0:
            read, sizes[factor_name] = f"({name} {factor_name})", rows // outputs
        elif 1 < rows < outputs and outputs % rows == 0:
            make, sizes[factor_name] = f"({name} {factor_name})", outputs // rows
        elif rows != outputs:
            make = f"{name}made"
        reads.append(read)
        makes.append(make)
    others = [
        [f"o{index}_{axis}" for axis in range(len(operand))]
        for index, operand in enumerate(operands)
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
        lambda cotangent, x, kernel: _cotangents(operator, cotangent, x, kernel),
        lambda cotangent, x, kernel: _operand_cotangents(operator, cotangent, x, kernel),
    )


def _cotangent_pulls(operator: Operator) -> Pulls | None:
    if not operator.free:
        return None
    return (
        lambda moved, cotangent, x, kernel: _outputs(operator, moved, kernel),
        None,
        lambda moved, cotangent, x, kernel: _operand_cotangents(operator, cotangent, moved, kernel),
    )


def _operand_cotangent_pulls(operator: Operator) -> Pulls | None:
    return (
        lambda moved, cotangent, x, kernel: _outputs(operator, x, moved),
        lambda moved, cotangent, x, kernel: _cotangents(operator, cotangent, x, moved),
        None,
    )


_outputs = partitioned(_unsharded, _split, _rule, _pulls)
_cotangents = partitioned(_unsharded_cotangent, _split_cotangent, _cotangent_rule, _cotangent_pulls)
_operand_cotangents = partitioned(
    _unsharded_operand_cotangent,
    _split_operand_cotangent,
    _operand_cotangent_rule,
    _operand_cotangent_pulls,
)
