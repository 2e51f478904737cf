"""Restoring by other names: a map between two models' weights, on the way from the file.

The map is any function of `{name: array}` that JAX can trace, or an object with such a method
`apply`, as `iso.weights.WeightMap`. Its inputs are read spread evenly over the devices of the
target, whatever layout they were saved by; then one compiled program makes the results, in the
layouts wanted. So a device reads its share and no more.

>>> def swapped(tree):
...     return {"up.kernel": tree["up.weight"].T}
>>> mapped_entries({"up.weight": Entry((8, 4), "float32", "float32")}, swapped)["up.kernel"].shape
(4, 8)
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.blocks.block_layout import BlockLayout, lay_out_in_blocks
from isoshard.core.checkpoint.source import Entry, Memory, NamedState, Source, Wanted
from isoshard.core.errors import ShardingError, raise_collected
from isoshard.core.layout.leaf_paths import named_leaves
from isoshard.core.layout.mesh import mesh_of
from isoshard.core.layout.on_auto_axes import axes_of, on_auto_axes
from isoshard.core.layout.uneven import UnevenArray
from isoshard.core.transfer.device_dtypes import device_dtype

from .shard_reading import read_arrays
from .slots import Slot, is_key

Apply = Callable[[dict[str, Any]], Any]


def function_of(weights: Any, wanted: Mapping[str, Wanted]) -> Apply:
    """The function of a map.

    Args:
        weights: a function, or an object with a method `apply`; a map whose `by_target` is true is
            told what is wanted. Or a dictionary of those by the name of a branch: each sees the
            names below its branch, and the rest keeps its names.
        wanted: the arrays that are wanted, by name.

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
            branch: function_of(one, dict(_below(wanted, branch)))
            for branch, one in weights.items()
        }
        return functools.partial(_apply_branches, branches)
    method = getattr(weights, "apply", weights)
    if not callable(method):
        raise TypeError(
            "weights is a function of {name: array}, an object with such a method `apply`, or a "
            f"dictionary of those by branch; given was a {type(weights).__name__}"
        )
    if getattr(weights, "by_target", False):
        return functools.partial(method, like=_shapes(wanted))
    return method


def _apply_branches(branches: Mapping[str, Apply], tree: dict[str, Any]) -> dict[str, Any]:
    outputs: dict[str, Any] = {}
    for branch, apply in branches.items():
        leaves = named_leaves(apply(dict(_below(tree, branch))))
        outputs |= {f"{branch}.{name}": leaf for name, leaf in leaves}
    starts = tuple(f"{branch}." for branch in branches)
    return {name: leaf for name, leaf in tree.items() if not name.startswith(starts)} | outputs


def _below(tree: Mapping[str, Any], branch: str) -> Iterator[tuple[str, Any]]:
    start = f"{branch}."
    return ((name[len(start) :], x) for name, x in tree.items() if name.startswith(start))


def _shapes(wanted: Mapping[str, Wanted]) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        name: jax.ShapeDtypeStruct(
            one.shape, jax.dtypes.canonicalize_dtype(jax.numpy.dtype(one.dtype))
        )
        for name, one in wanted.items()
        if not is_key(one.dtype)
    }


def mapped_entries(saved: Mapping[str, Entry], apply: Apply) -> dict[str, Entry]:
    """The entries of a checkpoint by their new names.

    The map takes all arrays but random keys; other entries remain as they are.

    Raises:
        ShardingError: JAX would lose digits of some arrays.
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
    """As `read_arrays`, of the outputs of a map; `slots` and `saved` have the new names."""
    kept = {name for name, entry in source.entries.items() if not _is_mapped(entry)}
    unmapped = read_arrays(source, [slot for slot in slots if slot.name in kept], saved)
    wanted = {slot.name: slot.wanted for slot in slots if slot.wanted and slot.name not in kept}
    mesh = _mesh_of(wanted)
    inputs = read_arrays(
        source,
        [
            Slot(name, NamedState(None), Wanted(one.shape, one.stored, _spread(one.shape, mesh)))
            for name, one in source.entries.items()
            if _is_mapped(one)
        ],
        source.entries,
    )
    places = {name: _reachable(one, mesh) for name, one in wanted.items()}

    def chosen(tree: dict[str, Any]) -> dict[str, Any]:
        outputs = dict(named_leaves(apply(tree)))
        return {
            name: lay_out_in_blocks(outputs[name], place)
            if isinstance(place, BlockLayout)
            else outputs[name]
            for name, place in places.items()
        }

    layouts = {name: _sharding_of(place) for name, place in places.items()}
    with axes_of(mesh) if mesh is not None else contextlib.nullcontext():
        outputs = jax.jit(on_auto_axes(chosen), out_shardings=layouts)(inputs)
    return unmapped | {name: _placed(outputs[name], one) for name, one in wanted.items()}


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


def _mesh_of(wanted: Mapping[str, Wanted]) -> Mesh | None:
    """The largest mesh that results go to."""
    places = [_sharding_of(one.place) for one in wanted.values()]
    meshes = [mesh_of(place) for place in places if isinstance(place, NamedSharding)]
    return max(meshes, key=lambda mesh: mesh.size, default=None)


def _sharding_of(place: Any) -> Any:
    """The layout of the buffers; of anything else itself."""
    return place.sharding if isinstance(place, BlockLayout) else place


def _spread(shape: tuple[int, ...], mesh: Mesh | None) -> Any:
    """An even share for each device, if an axis divides."""
    if mesh is None:
        return Memory.DEFAULT_DEVICE
    for axis in sorted(range(len(shape)), key=lambda axis: -shape[axis]):
        if shape[axis] and shape[axis] % mesh.size == 0:
            return NamedSharding(mesh, P(*(None,) * axis, mesh.axis_names))
    return NamedSharding(mesh, P())


def _reachable(wanted: Wanted, mesh: Mesh | None) -> Any:
    """Where a program over the mesh can leave a result on its way."""
    if mesh is None:
        return None
    place = _sharding_of(wanted.place)
    here = isinstance(place, NamedSharding) and place.device_set == set(mesh.devices.flat)
    return wanted.place if here else NamedSharding(mesh, P())


def _placed(output: Any, wanted: Wanted) -> jax.Array | UnevenArray | np.ndarray:
    if isinstance(wanted.place, BlockLayout):
        if isinstance(output, UnevenArray):
            return output
        return lay_out_in_blocks(output, wanted.place)
    if wanted.place is Memory.HOST:
        full = output.addressable_data(0) if output.is_fully_replicated else output
        return np.array(full).astype(jax.numpy.dtype(wanted.dtype))
    if isinstance(wanted.place, Memory) or output.sharding == wanted.place:
        return output
    return jax.device_put(output, wanted.place)
