"""Equality checks of processes that save or restore a checkpoint together.

Of an array on several processes each writes its own shards, and must have the same sharding. Of
what each process has in full, host memory, arrays on its own devices and numbers, the first one
writes its own for all: other values of other processes would be lost without an error.

A checkpoint is restored together where an array of it is sharded over several processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding

from isoshard.core.checkpoint.source import Entry, Memory
from isoshard.core.frameworks import framework_of
from isoshard.core.processes.coordination import rank_and_size
from isoshard.core.transfer.process_local import owners_of
from isoshard.core.transfer.value_sums import value_sum

from .slots import Slot

RESTORE_SUBJECT = "what iso.restore is given"


def save_lines(options: Mapping[str, Any], root: str, leaves: Any) -> list[str]:
    """A line for a save, and one for each leaf; of what a process has in full, with a checksum.

    Args:
        options: of the call, by name.
        root: the folder.
        leaves: to be saved; see `saving`.
    """
    lines = [f"{root}, " + ", ".join(f"{key} {value!r}" for key, value in options.items())]
    for name, content in leaves.contents.items():
        entry, array = content.entry, content.array
        line = f"{name}: {entry.shape} {entry.dtype} as {entry.stored}"
        if isinstance(array, np.ndarray) or getattr(array, "is_fully_addressable", False):
            line += f", values {value_sum(array)}"
        else:
            line += f" by {entry.spec} in shards of {content.shard}"
        lines.append(line)
    lines += [f"{name} = {entry.value!r}" for name, entry in leaves.values.items()]
    return lines + [f"{name} is {other}" for name, other in leaves.same.items()]


def sharing_ranks(like: Any, mesh: Any) -> tuple[int, ...]:
    """The processes over which a tree will be sharded, by its arrays; none if there is only one.

    Example:
        >>> sharing_ranks({"w": np.ones(3)}, None)
        ()
    """
    if rank_and_size()[1] == 1:
        return ()
    if isinstance(mesh, Mesh):
        return _several(owners_of(mesh))
    arrays: list[Any] = []
    for leaf in jax.tree.leaves(like):
        framework = framework_of(leaf)
        arrays += [leaf] if framework is None else framework.elements(leaf).values()
    return _ranks([getattr(array, "sharding", None) for array in arrays])


def ranks_of_slots(slots: Sequence[Slot]) -> tuple[int, ...]:
    """The processes over which slots are sharded; none if there is only one."""
    if rank_and_size()[1] == 1:
        return ()
    return _ranks([_layout(slot) for slot in slots])


def restore_lines(where: str, slots: Sequence[Slot], saved: Mapping[str, Entry]) -> list[str]:
    """A line for the checkpoint at `where`, and one for each leaf that will be filled."""
    lines = [f"the checkpoint {where}"]
    for slot in slots:
        if slot.target is None:
            lines.append(f"{slot.name} = {saved[slot.name].value!r}")
            continue
        layout = _layout(slot)
        own_memory = "host memory" if slot.target.destination is Memory.HOST else "its own devices"
        destination = (
            own_memory
            if layout is None or layout.is_fully_addressable
            else f"{slot.target.destination}"
        )
        lines.append(f"{slot.name}: {slot.target.shape} {slot.target.dtype} in {destination}")
    return lines


def _layout(slot: Slot) -> Sharding | None:
    destination = None if slot.target is None else slot.target.destination
    layout = getattr(destination, "sharding", destination)
    return layout if isinstance(layout, Sharding) else None


def _ranks(layouts: Sequence[Any]) -> tuple[int, ...]:
    shardings = [
        layout for layout in layouts if isinstance(layout, Sharding) and not _is_abstract(layout)
    ]
    shared = [sharding for sharding in shardings if not sharding.is_fully_addressable]
    ranks = {device.process_index for sharding in shared for device in sharding.device_set}
    return _several(tuple(sorted(ranks)))


def _is_abstract(layout: Sharding) -> bool:
    return isinstance(layout, NamedSharding) and isinstance(layout.mesh, AbstractMesh)


def _several(ranks: tuple[int, ...]) -> tuple[int, ...]:
    return ranks if len(ranks) > 1 else ()
