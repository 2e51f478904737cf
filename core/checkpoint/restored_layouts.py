"""Destinations of restored arrays: as in `like`, or on another mesh by a plan.

>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.plan import Plan
>>> groups, _ = named_groups({"w": jax.ShapeDtypeStruct((8, 4), "float32")})
>>> slots = slots_of(groups)
>>> mesh = make_mesh((4, 2), ("x", "y"))
>>> placed(groups, slots, {}, mesh, Plan({"w": ("x", "y")}))[0].target.destination.spec
P('x', 'y')
>>> saved = {"w": Entry((8, 4), "float32", spec=((), ("x",)))}
>>> placed(groups, slots, saved, mesh, None)[0].target.destination.spec
P(None, 'x')
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.blocks.block_layout import BlockLayout
from isoshard.core.checkpoint.source import Destination, Entry, Memory, TargetArray
from isoshard.core.errors import ShardingError, raise_collected
from isoshard.core.layout.axis_types import on_mesh, same_grid
from isoshard.core.layout.mesh import describe_mesh
from isoshard.core.layout.spec import named_sharding
from isoshard.core.plan import Plan
from isoshard.core.plan.unused_rules import warn_unused
from isoshard.core.runtime._jax_internals import meshes

from .leaf_groups import Group, named_groups
from .slots import Slot, is_key, slots_of, target_of

__all__ = ["named_groups", "placed", "slots_of"]

Named = NamedSharding | BlockLayout


def placed(
    groups: Sequence[Group],
    slots: Sequence[Slot],
    saved: Mapping[str, Entry],
    mesh: Mesh | None,
    plan: Any,
) -> list[Slot]:
    """Choose the destination of each array.

    Args:
        groups: the leaves of the tree.
        slots: their parts.
        saved: the checkpoint's entries, with the specs they were saved by.
        mesh: the new mesh; None shards everything as in `like`: a sharding over an abstract mesh,
            as shapes from `jax.eval_shape` have it, becomes one over that of `jax.set_mesh`.
            Blocks keep their unequal sizes if the new mesh has as many, and otherwise get those of
            `torch.chunk`.
        plan: a `Plan`, or one spec for all. None keeps the specs that `like` has, and gives what
            has none the spec it was saved by; host memory remains host memory.

    Returns:
        The slots with their destinations.

    Raises:
        ShardingError: naming every leaf whose spec does not fit the mesh, or that has no devices to
            go to.
    """
    if mesh is None:
        return [_follow(slot, {}, False) for slot in _on_devices(slots)]
    if plan is None:
        shardings = _by_specs(slots, saved, mesh)
    else:
        shardings = _by_plan(
            groups, slots, mesh, plan if isinstance(plan, Plan) else Plan({"*": plan})
        )
    moved = [slot.at(shardings[slot.name]) if slot.name in shardings else slot for slot in slots]
    destinations = {
        id(slot.part.value): slot.target.destination for slot in moved if slot.target is not None
    }
    return [_follow(slot, destinations, slot.name not in shardings) for slot in moved]


def _on_devices(slots: Sequence[Slot]) -> list[Slot]:
    """The slots; shardings over an abstract mesh become ones over that of `jax.set_mesh`."""
    moved, errors = [], []
    for slot in slots:
        destination = None if slot.target is None else slot.target.destination
        if isinstance(destination, NamedSharding) and isinstance(destination.mesh, AbstractMesh):
            mesh = meshes.get_mesh()
            if same_grid(mesh, destination.mesh):
                slot = slot.at(on_mesh(destination, mesh))
            else:
                errors.append(
                    ShardingError(
                        f"{slot.name}: its layout {destination.spec} is over the abstract mesh "
                        f"{describe_mesh(destination.mesh)}, which has no devices; pass a mesh: "
                        "iso.restore(.., mesh=mesh), or under `with jax.set_mesh(mesh):`"
                    )
                )
        moved.append(slot)
    raise_collected(errors)
    return moved


def _by_specs(slots: Sequence[Slot], saved: Mapping[str, Entry], mesh: Mesh) -> dict[str, Named]:
    shardings, errors = {}, []
    for slot in slots:
        if slot.target is None or slot.target.destination is Memory.HOST:
            continue
        destination, entry = slot.target.destination, saved.get(slot.name)
        before = P(*entry.spec) if entry is not None and entry.spec else P()
        if isinstance(destination, BlockLayout):
            destination = destination.sharding
        spec = destination.spec if isinstance(destination, NamedSharding) else before
        try:
            shardings[slot.name] = _on_mesh(slot, mesh, spec)
        except ShardingError as error:
            errors.append(error)
    raise_collected(errors)
    return shardings


def _by_plan(
    groups: Sequence[Group], slots: Sequence[Slot], mesh: Mesh, plan: Plan
) -> dict[str, Named]:
    """Shardings as `shard` would choose them; an optimizer's state follows its parameters."""
    by_name = {slot.name: slot for slot in slots}
    shardings: dict[str, NamedSharding] = {}
    arrays, wrapped, modules = {}, {}, []
    for group in groups:
        if not group.stateful:
            target = by_name[group.name].target
            if target is not None:
                arrays[group.name] = _plan_leaf(target, mesh)
            continue
        if any(part.follows is not None for part in group.parts.values()):
            continue
        is_array = hasattr(group.value, "shape")  # made of several: see `Within`
        shape = None
        if is_array:
            shape = types.SimpleNamespace(shape=tuple(group.value.shape), dtype=None)
            wrapped[group.name] = shape
        else:
            modules.append(group.value)
        targets = {inner: by_name[group.full_name(inner)].target for inner in group.parts}
        blocks = {
            inner: _plan_leaf(target, mesh)
            for inner, target in targets.items()
            if target is not None and isinstance(target.destination, BlockLayout)
        }
        if is_array:
            resolved = {"": plan.resolve({group.name: shape}, mesh).shardings[group.name]}
        else:
            resolved = {**plan.resolve(group.value, mesh).shardings}
        resolved |= plan.resolve(blocks, mesh).shardings if blocks else {}
        by_array = {}  # a plan names tied arrays once, random keys not at all
        for inner, part in group.parts.items():
            sharding = resolved.get(inner if part.within is None else part.within.name)
            if sharding is not None:
                by_array[id(part.value)] = (
                    sharding if part.within is None else part.within.fit(sharding)
                )
        for inner, part in group.parts.items():
            if targets[inner] is not None:
                replicated = NamedSharding(mesh, P())
                shardings[group.full_name(inner)] = by_array.get(id(part.value), replicated)
    if arrays:
        shardings.update(plan.resolve(arrays, mesh).shardings)
    warn_unused(
        plan, *modules, {name: leaf for name, leaf in {**arrays, **wrapped}.items() if name}
    )
    return {
        name: _on_mesh(by_name[name], mesh, sharding.spec) for name, sharding in shardings.items()
    }


def _plan_leaf(target: TargetArray, mesh: Mesh) -> Any:
    """An array as a plan resolves it; blocks of unequal sizes need not divide."""
    shape = target.shape
    if isinstance(target.destination, BlockLayout):
        shape = tuple(-(-extent // mesh.size) * mesh.size for extent in shape)
    dtype = None if is_key(target.dtype) else jax.numpy.dtype(target.dtype)
    return types.SimpleNamespace(shape=shape, dtype=dtype)


def _follow(slot: Slot, destinations: Mapping[int, Destination], free: bool) -> Slot:
    """Shard an optimizer's state as its parameter, if it is not created or placed yet."""
    part, target = slot.part, slot.target
    if part.follows is None or target is None or not (free or isinstance(part.value, Entry)):
        return slot
    leader = target_of(part.follows)
    assert leader is not None
    destination = destinations.get(id(part.follows), leader.destination)
    if target.shape == leader.shape:
        return slot.at(destination)
    scalar_on_host = target.destination is Memory.HOST and not target.shape
    if isinstance(destination, BlockLayout):
        destination = destination.sharding
    if isinstance(destination, NamedSharding) and not scalar_on_host:
        return slot.at(NamedSharding(destination.mesh, P()))
    return slot


def _on_mesh(slot: Slot, mesh: Mesh, spec: Any) -> Named:
    """A slot's sharding on another mesh; blocks of unequal sizes need not divide there."""
    assert slot.target is not None
    shape, destination = slot.target.shape, slot.target.destination
    blocks = isinstance(destination, BlockLayout)
    divided = None if blocks else shape
    sharding = named_sharding(spec, mesh, len(shape), shape=divided, name=slot.name)
    return destination.resharded(sharding.spec, mesh) if blocks else sharding
