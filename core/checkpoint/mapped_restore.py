"""Restoring by other names: a map between two models' weights, applied while loading.

The map is any function of `{name: array}` that JAX can trace, or an object with such a method
`apply`, as `iso.weights.WeightMap`. Its inputs are read evenly sharded over the devices of the
targets, whatever sharding they were saved by; then one compiled program computes the results with
the targets' shardings. So a device reads its share and no more.

>>> def swapped(tree):
...     return {"up.kernel": tree["up.weight"].T}
>>> mapped_entries({"up.weight": Entry((8, 4), "float32", "float32")}, swapped)["up.kernel"].shape
(4, 8)
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.blocks.block_layout import BlockLayout, lay_out_in_blocks
from isoshard.core.checkpoint.source import Entry, Memory, NamedState, Source, TargetArray
from isoshard.core.errors import ShardingError, raise_collected
from isoshard.core.layout.leaf_paths import named_leaves
from isoshard.core.layout.mesh import mesh_of
from isoshard.core.layout.on_auto_axes import axes_of, on_auto_axes
from isoshard.core.layout.uneven import UnevenArray
from isoshard.core.transfer.device_dtypes import device_dtype

from .leaf_groups import below
from .shard_reading import read_arrays
from .slots import Slot, is_key

Apply = Callable[[dict[str, Any]], Any]


def function_of(weights: Any, targets: Mapping[str, TargetArray]) -> Apply:
    """The function of a map.

    Args:
        weights: a function, or an object with a method `apply`; a map whose `by_target` is true is
            passed `targets` as `like`. Or a dictionary of those by the name of a branch: each gets
            the names below its branch, and the rest keeps its names.
        targets: the arrays to be restored, by name.

    Returns:
        A function of `{name: array}`.

    Raises:
        TypeError: it is none of those.

    Example:
        >>> fn = function_of({"model": lambda tree: {"kernel": tree["weight"]}}, {})
        >>> fn({"model.weight": 1, "step": 2})
        {'step': 2, 'model.kernel': 1}
    """
    if isinstance(weights, Mapping):
        branches = {
            branch: function_of(branch_weights, below(targets, branch))
            for branch, branch_weights in weights.items()
        }
        return functools.partial(_apply_branches, branches)
    method = getattr(weights, "apply", weights)
    if not callable(method):
        raise TypeError(
            "weights is a function of {name: array}, an object with such a method `apply`, or a "
            f"dictionary of those by branch; got a {type(weights).__name__}"
        )
    if getattr(weights, "by_target", False):
        return functools.partial(method, like=_shapes(targets))
    return method


def _apply_branches(branches: Mapping[str, Apply], tree: dict[str, Any]) -> dict[str, Any]:
    outputs: dict[str, Any] = {}
    for branch, apply in branches.items():
        leaves = named_leaves(apply(below(tree, branch)))
        outputs |= {f"{branch}.{name}": leaf for name, leaf in leaves}
    starts = tuple(f"{branch}." for branch in branches)
    return {name: leaf for name, leaf in tree.items() if not name.startswith(starts)} | outputs


def _shapes(targets: Mapping[str, TargetArray]) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        name: jax.ShapeDtypeStruct(
            target.shape, jax.dtypes.canonicalize_dtype(jax.numpy.dtype(target.dtype))
        )
        for name, target in targets.items()
        if not is_key(target.dtype)
    }


def mapped_entries(saved: Mapping[str, Entry], apply: Apply) -> dict[str, Entry]:
    """The entries of a checkpoint by their new names.

    The map takes all arrays but random keys; other entries remain as they are.

    Raises:
        ShardingError: arrays have more bits than JAX computes with.
    """
    outputs = jax.eval_shape(on_auto_axes(apply), _inputs(saved))
    entries = {
        name: Entry(tuple(leaf.shape), leaf.dtype.name, leaf.dtype.name)
        for name, leaf in named_leaves(outputs)
    }
    return {name: entry for name, entry in saved.items() if not _is_mapped(entry)} | entries


def read_mapped(
    source: Source, slots: Sequence[Slot], saved: Mapping[str, Entry], apply: Apply
) -> dict[str, jax.Array | UnevenArray | np.ndarray]:
    """Read arrays like `read_arrays`, by a map; `slots` and `saved` have the new names."""
    unmapped_names = {name for name, entry in source.entries.items() if not _is_mapped(entry)}
    unmapped = read_arrays(source, [slot for slot in slots if slot.name in unmapped_names], saved)
    targets = {
        slot.name: slot.target for slot in slots if slot.target and slot.name not in unmapped_names
    }
    mesh = _mesh_of(targets)
    inputs = read_arrays(
        source,
        [
            Slot(
                name,
                NamedState(None),
                TargetArray(entry.shape, entry.stored, _spread(entry.shape, mesh)),
            )
            for name, entry in source.entries.items()
            if _is_mapped(entry)
        ],
        source.entries,
    )
    destinations = {name: _out_sharding(target, mesh) for name, target in targets.items()}

    def mapped(tree: dict[str, Any]) -> dict[str, Any]:
        outputs = dict(named_leaves(apply(tree)))
        return {
            name: lay_out_in_blocks(outputs[name], destination)
            if isinstance(destination, BlockLayout)
            else outputs[name]
            for name, destination in destinations.items()
        }

    shardings = {name: _sharding_of(destination) for name, destination in destinations.items()}
    with axes_of(mesh) if mesh is not None else contextlib.nullcontext():
        outputs = jax.jit(on_auto_axes(mapped), out_shardings=shardings)(inputs)
    return unmapped | {name: _placed(outputs[name], target) for name, target in targets.items()}


def _inputs(saved: Mapping[str, Entry]) -> dict[str, jax.ShapeDtypeStruct]:
    inputs, errors = {}, []
    for name, entry in saved.items():
        if not _is_mapped(entry):
            continue
        try:
            dtype = device_dtype(jax.numpy.dtype(entry.stored), name)
            inputs[name] = jax.ShapeDtypeStruct(entry.shape, dtype)
        except ShardingError as error:
            errors.append(error)
    raise_collected(errors)
    return inputs


def _is_mapped(entry: Entry) -> bool:
    return not entry.is_value and not is_key(entry.dtype)


def _mesh_of(targets: Mapping[str, TargetArray]) -> Mesh | None:
    """The largest mesh of the targets."""
    shardings = [_sharding_of(target.destination) for target in targets.values()]
    meshes = [mesh_of(sharding) for sharding in shardings if isinstance(sharding, NamedSharding)]
    return max(meshes, key=lambda mesh: mesh.size, default=None)


def _sharding_of(destination: Any) -> Any:
    """The sharding of a `BlockLayout`'s buffers; any other destination itself."""
    return destination.sharding if isinstance(destination, BlockLayout) else destination


def _spread(shape: tuple[int, ...], mesh: Mesh | None) -> Any:
    """A sharding of an axis over all devices, if one divides."""
    if mesh is None:
        return Memory.DEFAULT_DEVICE
    for axis in sorted(range(len(shape)), key=lambda axis: -shape[axis]):
        if shape[axis] and shape[axis] % mesh.size == 0:
            return NamedSharding(mesh, P(*(None,) * axis, mesh.axis_names))
    return NamedSharding(mesh, P())


def _out_sharding(target: TargetArray, mesh: Mesh | None) -> Any:
    """The sharding of a target's result in the program over the mesh, before it is moved."""
    if mesh is None:
        return None
    sharding = _sharding_of(target.destination)
    on_same_devices = isinstance(sharding, NamedSharding) and sharding.device_set == set(
        mesh.devices.flat
    )
    return target.destination if on_same_devices else NamedSharding(mesh, P())


def _placed(output: Any, target: TargetArray) -> jax.Array | UnevenArray | np.ndarray:
    if isinstance(target.destination, BlockLayout):
        if isinstance(output, UnevenArray):
            return output
        return lay_out_in_blocks(output, target.destination)
    if target.destination is Memory.HOST:
        full = output.addressable_data(0) if output.is_fully_replicated else output
        return np.array(full).astype(jax.numpy.dtype(target.dtype))
    if isinstance(target.destination, Memory) or output.sharding == target.destination:
        return output
    return jax.device_put(output, target.destination)
