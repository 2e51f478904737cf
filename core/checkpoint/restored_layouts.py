"""Where restored arrays go: as `like` says, or onto another mesh by a plan.

>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.plan import Plan
>>> groups, _ = named_groups({"w": jax.ShapeDtypeStruct((8, 4), "float32")})
>>> slots = slots_of(groups)
>>> mesh = make_mesh((4, 2), ("x", "y"))
>>> placed(groups, slots, {}, mesh, Plan({"w": ("x", "y")}))[0].wanted.place.spec
P('x', 'y')
>>> saved = {"w": Entry((8, 4), "float32", spec=((), ("x",)))}
>>> placed(groups, slots, saved, mesh, None)[0].wanted.place.spec
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
from isoshard.core.checkpoint.source import Entry, Memory, Place, Wanted
from isoshard.core.errors import ShardingError, raise_collected
from isoshard.core.layout.axis_types import on_mesh, same_grid
from isoshard.core.layout.mesh import describe_mesh
from isoshard.core.layout.spec import named_sharding
from isoshard.core.plan import Plan
from isoshard.core.plan.unused_rules import warn_unused
from isoshard.core.runtime._jax_internals import meshes

from .leaf_groups import Group, named_groups
from .slots import Slot, is_key, slots_of, wanted_of

__all__ = ["named_groups", "placed", "slots_of"]

Named = NamedSharding | BlockLayout


def placed(
    groups: Sequence[Group],
    slots: Sequence[Slot],
    saved: Mapping[str, Entry],
    mesh: Mesh | None,
    plan: Any,
) -> list[Slot]:
    """Choose where each array goes.

    Args:
        groups: the leaves of the tree.
        slots: their parts.
        saved: what the checkpoint has, with the specs it was saved by.
        mesh: the new mesh; None leaves everything where `like` has it: a layout over an abstract
            mesh, as shapes from `jax.eval_shape` have it, is one over that of `jax.set_mesh`.
            Blocks of unequal sizes keep these where there are as many, and are otherwise as
            `torch.chunk` makes them.
        plan: a `Plan`, or one spec for all. None keeps the specs that `like` has, and gives what
            has none the spec it was saved by; host memory stays host memory.

    Returns:
        The slots with their places.

    Raises:
        ShardingError: naming every leaf whose spec does not fit the mesh, or that has no devices to
            go to.
    """
    if mesh is None:
        return [_follow(slot, {}, False) for slot in _on_devices(slots)]
    if plan is None:
        places = _by_specs(slots, saved, mesh)
    else:
        places = _by_plan(
            groups, slots, mesh, plan if isinstance(plan, Plan) else Plan({"*": plan})
        )
    moved = [slot.at(places[slot.name]) if slot.name in places else slot for slot in slots]
    known = {id(slot.part.value): slot.wanted.place for slot in moved if slot.wanted is not None}
    return [_follow(slot, known, slot.name not in places) for slot in moved]


def _on_devices(slots: Sequence[Slot]) -> list[Slot]:
    """Layouts over an abstract mesh, over the devices that `jax.set_mesh` has set."""
    found, faults = [], []
    for slot in slots:
        place = None if slot.wanted is None else slot.wanted.place
        if isinstance(place, NamedSharding) and isinstance(place.mesh, AbstractMesh):
            mesh = meshes.get_mesh()
            if same_grid(mesh, place.mesh):
                slot = slot.at(on_mesh(place, mesh))
            else:
                faults.append(
                    ShardingError(
                        f"{slot.name}: its layout {place.spec} is over the abstract mesh "
                        f"{describe_mesh(place.mesh)}, which has no devices; say which: "
                        "iso.restore(.., mesh=mesh), or under `with jax.set_mesh(mesh):`"
                    )
                )
        found.append(slot)
    raise_collected(faults)
    return found


def _by_specs(slots: Sequence[Slot], saved: Mapping[str, Entry], mesh: Mesh) -> dict[str, Named]:
    places, faults = {}, []
    for slot in slots:
        if slot.wanted is None or slot.wanted.place is Memory.HOST:
            continue
        place, entry = slot.wanted.place, saved.get(slot.name)
        before = P(*entry.spec) if entry is not None and entry.spec else P()
        if isinstance(place, BlockLayout):
            place = place.sharding
        spec = place.spec if isinstance(place, NamedSharding) else before
        try:
            places[slot.name] = _laid(slot, mesh, spec)
        except ShardingError as error:
            faults.append(error)
    raise_collected(faults)
    return places


def _by_plan(
    groups: Sequence[Group], slots: Sequence[Slot], mesh: Mesh, plan: Plan
) -> dict[str, Named]:
    """What `shard` would do. Modules are asked by their own names; an optimizer's state follows."""
    by_name = {slot.name: slot for slot in slots}
    places: dict[str, NamedSharding] = {}
    arrays, asked = {}, []
    for group in groups:
        if not group.whole:
            wanted = by_name[group.name].wanted
            if wanted is not None:
                arrays[group.name] = _asked(wanted, mesh)
            continue
        if any(part.follows is not None for part in group.parts.values()):
            continue
        asked.append(group.value)
        parts = {inner: by_name[group.called(inner)].wanted for inner in group.parts}
        blocks = {
            inner: _asked(wanted, mesh)
            for inner, wanted in parts.items()
            if wanted is not None and isinstance(wanted.place, BlockLayout)
        }
        found = {**plan.resolve(group.value, mesh).shardings}
        found |= plan.resolve(blocks, mesh).shardings if blocks else {}
        same = {id(group.parts[name].value): at for name, at in found.items() if name in parts}
        for inner, part in group.parts.items():  # tied ones are called once, random keys not at all
            if parts[inner] is not None:
                place = same.get(id(part.value), NamedSharding(mesh, P()))
                places[group.called(inner)] = found.get(inner, place)
    if arrays:
        places.update(plan.resolve(arrays, mesh).shardings)
    warn_unused(plan, *asked, {name: leaf for name, leaf in arrays.items() if name})
    return {name: _laid(by_name[name], mesh, place.spec) for name, place in places.items()}


def _asked(wanted: Wanted, mesh: Mesh) -> Any:
    """An array as a plan is asked about it; blocks of unequal sizes need not divide."""
    shape = wanted.shape
    if isinstance(wanted.place, BlockLayout):
        shape = tuple(-(-extent // mesh.size) * mesh.size for extent in shape)
    dtype = None if is_key(wanted.dtype) else jax.numpy.dtype(wanted.dtype)
    return types.SimpleNamespace(shape=shape, dtype=dtype)


def _follow(slot: Slot, known: Mapping[int, Place], free: bool) -> Slot:
    """Lay an optimizer's state out as its parameter, if it is not made yet or nobody placed it."""
    part, wanted = slot.part, slot.wanted
    if part.follows is None or wanted is None or not (free or isinstance(part.value, Entry)):
        return slot
    leader = wanted_of(part.follows)
    assert leader is not None
    place = known.get(id(part.follows), leader.place)
    if wanted.shape == leader.shape:
        return slot.at(place)
    scalar_on_host = wanted.place is Memory.HOST and not wanted.shape
    if isinstance(place, BlockLayout):
        place = place.sharding
    if isinstance(place, NamedSharding) and not scalar_on_host:
        return slot.at(NamedSharding(place.mesh, P()))
    return slot


def _laid(slot: Slot, mesh: Mesh, spec: Any) -> Named:
    """A layout on another mesh; blocks of unequal sizes need not divide there."""
    assert slot.wanted is not None
    shape, place = slot.wanted.shape, slot.wanted.place
    blocks = isinstance(place, BlockLayout)
    divided = None if blocks else shape
    sharding = named_sharding(spec, mesh, len(shape), shape=divided, name=slot.name)
    return place.resharded(sharding.spec, mesh) if blocks else sharding
