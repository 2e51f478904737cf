"""A group's operations on the arrays themselves, on the devices that have them.

A sharded array goes through one compiled program whose results have the sharding that follows from
that of the sources, so each device works on its own shard and nothing moves. Equal layers share one
program. An array that needs no operation is returned as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.layout.spec import axis_names, named_sharding
from isoshard.core.runtime._jax_internals.tracers import Tracer
from isoshard.core.runtime.caches import cached

from .matching import RuleGroup
from .ops import Entries, Op, OpError
from .weight_rules import Rule


def layouts_of(group: RuleGroup, arrays: Mapping[str, Any]) -> tuple[NamedSharding, ...] | None:
    """The layouts of a group's results, in the order of its targets.

    Returns:
        A sharding for each target of each layer; None if the sources are on no mesh (NumPy arrays,
        a single device, traced values, shapes).

    Raises:
        OpError: the sources are on different meshes, or data would have to move.
    """
    sources = [arrays[name] for names in group.sources for name in names]
    array_shardings = [getattr(array, "sharding", None) for array in sources if not _traced(array)]
    named = [sharding for sharding in array_shardings if isinstance(sharding, NamedSharding)]
    if not named:
        return None
    meshes = {sharding.mesh for sharding in named}
    if len(named) < len(sources) or len(meshes) > 1:
        raise OpError("its sources are not on one mesh; shard them first with iso.shard")
    mesh, rule = named[0].mesh, group.rule
    per_layer = len(rule.sources)
    rows = [
        tuple(_entries(s.spec, x.ndim) for s, x in zip(named[at:], sources[at:], strict=True))[
            :per_layer
        ]
        for at in range(0, len(named), per_layer)
    ]
    if len(set(rows)) > 1:
        raise OpError("the layers that are stacked are sharded differently")
    layouts: Sequence[Entries] = rows[0]
    at = rule.stack_axis
    if rule.unstacks:
        if any(layout[at] for layout in layouts):
            raise OpError(
                f"axis {at}, along which the layers are stacked, is split over {layouts[0][at]}"
            )
        layouts = [(*layout[:at], *layout[at + 1 :]) for layout in layouts]
    for op, shapes in zip(rule.ops, group.steps, strict=False):
        layouts = op.layouts(layouts, shapes, dict(mesh.shape))
    if rule.stacks:
        layouts = [(*layout[:at], (), *layout[at:]) for layout in layouts]
    targets = [_sharding(layout, mesh) for layout in layouts]
    return tuple(targets * len(group.targets))


def run_group(
    group: RuleGroup, arrays: Mapping[str, Any], layouts: tuple[NamedSharding, ...] | None
) -> dict[str, Any]:
    """The targets of a group.

    Args:
        group: what is to be done.
        arrays: the sources by name: JAX arrays, traced values, NumPy arrays or shapes with dtype.
        layouts: as `layouts_of` gives them.
    """
    sources = [arrays[name] for names in group.sources for name in names]
    names = [name for layer in group.targets for name in layer]
    rule = group.rule
    if not rule.ops and not rule.stack:
        return dict(zip(names, sources, strict=True))
    plain = _Plain(rule.ops, len(rule.sources), rule.stack_axis, rule.stacks, rule.unstacks)
    if all(isinstance(array, np.ndarray) for array in sources):
        targets = [np.ascontiguousarray(array) for array in plain(np, sources)]
    elif any(isinstance(array, jax.ShapeDtypeStruct) for array in sources):
        dtype = jnp.result_type(*(array.dtype for array in sources))
        targets = [
            jax.ShapeDtypeStruct(group.shapes[name], dtype, sharding=layouts and layouts[i])
            for i, name in enumerate(names)
        ]
    elif any(map(_traced, sources)):
        targets = plain(jnp, sources)
    else:
        targets = _program(plain, layouts)(sources)
    return dict(zip(names, targets, strict=True))


class _Plain:
    """The operations as a function; equal ones are equal, so that they are compiled once."""

    def __init__(self, ops: tuple[Op, ...], sources: int, axis: int, stacks: bool, unstacks: bool):
        self._key = (ops, sources, axis, stacks, unstacks)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Plain) and self._key == other._key

    def __call__(self, xp: Any, arrays: Sequence[Any]) -> list[Any]:
        ops, count, axis, stacks, unstacks = self._key
        if unstacks:
            layers = [[xp.take(x, i, axis) for x in arrays] for i in range(arrays[0].shape[axis])]
        else:
            layers = [arrays[i : i + count] for i in range(0, len(arrays), count)]
        outputs = []
        for layer in layers:
            for op in ops:
                layer = op.run(layer, xp)
            outputs.append(layer)
        if stacks:
            outputs = [[xp.stack(copies, axis) for copies in zip(*outputs, strict=True)]]
        return [array for layer in outputs for array in layer]


@cached(4096)
def _program(plain: _Plain, layouts: tuple[NamedSharding, ...] | None) -> Any:
    return jax.jit(functools.partial(plain, jnp), out_shardings=layouts and list(layouts))


def describe(rule: Rule) -> str:
    """The operations of a rule in a few words, for tables."""
    steps = [repr(op) for op in rule.ops]
    steps += [f"stack {rule.stack}"] if rule.stacks else []
    steps += [f"unstack {rule.stack}"] if rule.unstacks else []
    steps += ["tie"] if rule.tie else []
    return ", ".join(steps)


def _traced(array: Any) -> bool:
    return isinstance(array, Tracer)


def _entries(spec: P, rank: int) -> Entries:
    entries = tuple(map(axis_names, spec))
    return entries + ((),) * (rank - len(entries))


def _sharding(layout: Entries, mesh: Any) -> NamedSharding:
    if not isinstance(mesh, Mesh):
        raise OpError("its sources are on an abstract mesh, which has no devices")
    return named_sharding(P(*layout), mesh, len(layout))
