"""Restoring a tree from a checkpoint, in either framework and on any mesh."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any, overload

import jax
import numpy as np

from isoshard.core.layout.mesh import ambient_mesh, as_mesh
from isoshard.core.processes.agreement import assert_equal, error_lines, log_call
from isoshard.core.processes.coordination import ProcessGroup
from isoshard.core.transfer.array_like import AnyTree, K, Kept

from .equal_across_ranks import RESTORE_SUBJECT, ranks_of_slots, restore_lines, sharing_ranks
from .leaf_groups import Group, named_groups
from .mapped_restore import function_of, mapped_entries, read_mapped
from .opening import open_and_check
from .restored_layouts import placed
from .shard_reading import read_arrays
from .slots import Slot, compare, slots_of
from .source import Entry, Source


@overload
def restore(
    path: str | os.PathLike[str],
    like: dict[K, jax.Array] | dict[K, jax.ShapeDtypeStruct],
    mesh: Any = None,
    plan: Any = None,
    *,
    step: int | None = None,
    weights: Any = None,
    partial: bool = False,
) -> dict[K, jax.Array]: ...
@overload
def restore(
    path: str | os.PathLike[str],
    like: AnyTree | np.ndarray[Any, Any] | jax.ShapeDtypeStruct,
    mesh: Any = None,
    plan: Any = None,
    *,
    step: int | None = None,
    weights: Any = None,
    partial: bool = False,
) -> Any: ...
@overload
def restore(
    path: str | os.PathLike[str],
    like: Kept,
    mesh: Any = None,
    plan: Any = None,
    *,
    step: int | None = None,
    weights: Any = None,
    partial: bool = False,
) -> Kept: ...
def restore(
    path: str | os.PathLike[str],
    like: Any,
    mesh: Any = None,
    plan: Any = None,
    *,
    step: int | None = None,
    weights: Any = None,
    partial: bool = False,
) -> Any:
    """Restore a tree from a checkpoint.

    Example:
        >>> import tempfile, jax, isoshard as iso
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = iso.save(folder, {"w": np.ones((8, 4), np.float32), "epoch": 3})
        ...     like = {"w": jax.ShapeDtypeStruct((8, 4), "float32"), "epoch": 0}
        ...     mesh = iso.make_mesh((4, 2), ("x", "y"))
        ...     tree = iso.restore(folder, like, mesh, iso.P("x", "y"))
        >>> tree["w"].sharding.spec, tree["epoch"]
        (P('x', 'y'), 3)

    Leaves are matched by name, so any framework and any mesh may have saved them. Each process
    reads the shards of its own devices. Names, shapes, dtypes and files are checked before
    anything is read, and everything is read before anything is changed.

    Args:
        path: a folder that `iso.save` was given, a folder of `torch.distributed.checkpoint` or of a
            `CheckpointManager`, or a file or folder of safetensors.
        like: the tree to restore: arrays of either framework or `jax.ShapeDtypeStruct` (with a
            sharding, or for JAX's default device), also in blocks of unequal sizes, modules and
            optimizers, numbers and strings.
            Modules and optimizers are filled in place; the rest is returned anew. Modules may
            be abstract (`nnx.eval_shape`, torch's device "meta").
        mesh: another mesh to shard everything over, of any axis types. What `like` has in host
            memory remains there unless there is a plan.
        plan: a `Plan`, or one spec for all; the result is that of `iso.shard(.., mesh, plan)`, and
            `mesh` may be left out where `jax.set_mesh` has set one. Without a plan leaves keep the
            spec that they have in `like`, and abstract ones get that which they were saved by.
        step: of the checkpoint, if there are several; the newest unless given.
        weights: a map from the names of the checkpoint to those of `like`: an
            `iso.weights.WeightMap`, or a function of `{name: array}`; JAX traces it. Or a
            dictionary of those by branch, as `{"model": names}`: the rest keeps its names.
        partial: whether the checkpoint may have leaves that `like` does not have.

    Returns:
        The tree: the structure of `like`, values of the checkpoint, bit for bit.

    Raises:
        CheckpointError: there is no checkpoint, it was altered, or it does not fit: every leaf that
            is missing, not in `like`, or of another shape, dtype or kind is named.
        DistributedError: the processes' arguments or checkpoints differ. They are compared where
            an array is sharded over several processes.
        ShardingError: a spec does not fit the mesh; every such leaf is named. Or there is a plan,
            and no mesh.
    """
    ranks = sharing_ranks(like, mesh)
    try:
        prepared = _Prepared.of(path, like, mesh, plan, step, weights, partial, check_all=not ranks)
    except Exception as error:
        if ranks:
            assert_equal(RESTORE_SUBJECT, error_lines(error), ranks)
        raise
    ranks = ranks or ranks_of_slots(prepared.slots)

    def lines() -> list[str]:
        return restore_lines(prepared.source.where, prepared.slots, prepared.saved)

    if ranks:
        assert_equal(RESTORE_SUBJECT, lines(), ranks)
        group = ProcessGroup.of(ranks)
        group.run(lambda: prepared.check(group.rank, group.size))
    else:
        log_call(RESTORE_SUBJECT, lambda: "; ".join(lines()))
    if prepared.apply is None:
        values: dict[str, Any] = read_arrays(prepared.source, prepared.slots, prepared.saved)
    else:
        values = read_mapped(prepared.source, prepared.slots, prepared.saved, prepared.apply)
    values |= {
        slot.name: prepared.saved[slot.name].value for slot in prepared.slots if slot.target is None
    }
    return prepared.structure.unflatten([_filled(group, values) for group in prepared.groups])


@dataclasses.dataclass(frozen=True)
class _Prepared:
    """A restore whose checkpoint and arguments are checked, and of which nothing is read yet.

    Attributes:
        source: the checkpoint.
        check: checks this process's share of the files; see `open_and_check`.
        saved: the entries, under the names of the tree.
        apply: the map from the checkpoint's names, if there is one.
        groups: the leaves of the tree.
        structure: the tree.
        slots: the leaves to be filled, each with its destination.
    """

    source: Source
    check: Callable[[int, int], None]
    saved: Mapping[str, Entry]
    apply: Any
    groups: list[Group]
    structure: Any
    slots: list[Slot]

    @classmethod
    def of(
        cls,
        path: Any,
        like: Any,
        mesh: Any,
        plan: Any,
        step: Any,
        weights: Any,
        partial: bool,
        *,
        check_all: bool,
    ) -> _Prepared:
        """Open the checkpoint and compare it with `like`; see `restore` and `open_and_check`."""
        if mesh is None and plan is not None:
            mesh = ambient_mesh("iso.restore(path, like, mesh=mesh, plan=plan)")
        mesh = None if mesh is None else as_mesh(mesh)
        source, check = open_and_check(path, step, check_all=check_all)
        apply, saved = None, source.entries
        if weights is not None:
            slots = slots_of(named_groups(like)[0])
            apply = function_of(weights, {slot.name: slot.target for slot in slots if slot.target})
            saved = mapped_entries(saved, apply)
        groups, structure = named_groups(like, saved)
        slots = slots_of(groups)
        compare(slots, saved, partial=partial)
        slots = placed(groups, slots, saved, mesh, plan)
        compare(slots, saved, partial=partial)  # a destination may need another dtype
        return cls(source, check, saved, apply, groups, structure, slots)


def _filled(group: Group, values: dict[str, Any]) -> Any:
    parts = {inner: values[group.full_name(inner)] for inner in group.parts}
    if group.framework is not None:
        return group.framework.filled(group.value, parts)
    value = parts[""]
    return value[()] if isinstance(group.value, np.generic) else value
