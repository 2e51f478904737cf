"""A tensor's pieces, one per device of this process: snapshots to read, and to load back.

>>> import isoshard as iso, isoshard.torch_bridge as xs
>>> mesh = xs.Mesh(range(8), (8,), ("x",))
>>> t = xs.mark_sharding(torch.arange(16.0).to("jax"), mesh, ("x",))
>>> shards = t.local_shards
>>> shards[3]
XLAShard(data=tensor([6., 7.]), indices=[slice(6, 8, 1)], shard_device='CPU:3', replica_id=0)
>>> for shard in shards:
...     shard.data *= -1
>>> t.load_local_shards_(shards)
>>> t[6:8]
tensor([-6., -7.], device='jax:0')

The data are copies on the CPU, as in torch_xla. `isoshard.local_shards(t, framework="torch")` gives
the devices' own memory. Where a mark does not divide an axis, the pieces at the end are filled up
with zeros to the size of the others; `indices` and `unpadded_data` leave the filling out. Those of
a tensor in blocks of given sizes have just these (`uneven_shards`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from types import EllipsisType
from typing import Any

import jax
import numpy as np
import torch

from isoshard.core.layout.mesh import mesh_of
from isoshard.core.layout.uneven import UnevenArray
from isoshard.core.runtime import metrics
from isoshard.torch_bridge.common.argument_types import DeviceLike
from isoshard.torch_bridge.common.exchange import from_numpy, to_numpy
from isoshard.torch_bridge.engine.operators import reading
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.recording.recorder import recorder
from isoshard.torch_bridge.engine.values.value import Value

from . import marks, uneven_shards


@dataclasses.dataclass
class XLAShard:
    """One device's piece of a tensor.

    Attributes:
        data: a copy of the piece on the CPU, filled up with zeros where the axis does not divide.
        indices: where the piece lies in the whole, one slice per axis, without the filling; `...`
            if every device holds the whole.
        shard_device: the device, such as `"CPU:3"`.
        replica_id: 0 for the first device with this piece, 1 for the next.

    Example:
        >>> import isoshard.torch_bridge as xs
        >>> mesh = xs.get_1d_mesh("x")
        >>> shard = xs.mark_sharding(torch.arange(16.0).to("jax"), mesh, ("x",)).local_shards[1]
        >>> shard.data, shard.indices, shard.rank
        (tensor([2., 3.]), [slice(2, 4, 1)], 1)
    """

    data: torch.Tensor
    indices: EllipsisType | list[slice]
    shard_device: str
    replica_id: int

    @property
    def rank(self) -> int:
        """The device's place in `jax.devices()`."""
        return int(self.shard_device.rpartition(":")[2])

    @property
    def unpadded_data(self) -> torch.Tensor:
        """The part of `data` that belongs to the tensor; set it to change just that part."""
        return self.data[self._filled()]

    @unpadded_data.setter
    def unpadded_data(self, t: torch.Tensor) -> None:
        self.data[self._filled()] = t

    def _filled(self) -> Any:
        if isinstance(self.indices, EllipsisType):
            return ...
        return tuple(slice(0, index.stop - index.start) for index in self.indices)


def local_shards(tensor: lazy_tensor.LazyTensor) -> list[XLAShard] | None:
    """Copy a tensor's pieces to the CPU, in the order of `jax.devices()`.

    Args:
        tensor: on the `jax` device.

    Returns:
        One piece per device of this process; None for a value that is not computed yet and that
        nobody has marked. A marked one is computed now.
    """
    if marks.is_recorded(tensor) and marks.marked(tensor) is None:
        recorder().check_execution()  # the body of a call never has values
        return None
    recorder().refuse("the value of a tensor")
    array = reading.held(tensor)
    if isinstance(array, UnevenArray):
        return [
            XLAShard(
                _to_host(np.asarray(one.data), tensor.dtype),
                [slice(*place.indices(n)) for place, n in zip(one.index, array.shape, strict=True)],
                name_of(one.device),
                one.replica_id,
            )
            for one in uneven_shards.pieces(array)
        ]
    want = marks.asked(tensor)
    if want is None:
        want = array.sharding
    if not isinstance(want, marks.Sharding):
        (piece,) = array.addressable_shards
        data = _to_host(np.asarray(piece.data), tensor.dtype)
        return [XLAShard(data, ..., name_of(piece.device), 0)]
    held = {piece.device: piece for piece in array.addressable_shards}
    found, shape, chunks = [], tuple(tensor.shape), marks.chunks(tensor)
    size = _size(want, shape, chunks)
    for device, index, replica in _pieces(want, shape, chunks):
        if device in held:
            data = _cut(held[device], index, size)
            whole = marks.sharding_type(want, tensor.dim()) == marks.ShardingType.REPLICATED
            place: Any = ... if whole else list(index)
            number = marks.ordinal(device) if whole else replica
            found.append(XLAShard(_to_host(data, tensor.dtype), place, name_of(device), number))
    return found


def load(tensor: lazy_tensor.LazyTensor, shards: Sequence[XLAShard]) -> None:
    """Replace a tensor's elements by those of its pieces.

    Args:
        tensor: marked with a layout that splits it.
        shards: one per device of this process, in any order, of the sizes `local_shards` gives.

    Raises:
        RuntimeError: the tensor is not split, is a view, or the pieces are not all there or have
            other sizes.
    """
    shape = tuple(tensor.shape)
    if isinstance(tensor._storage.value.array, UnevenArray) and not tensor._chain.ops:
        _load_uneven(tensor, shards)
        return
    want, placed = marks.asked(tensor), marks.placed(tensor)
    if want is None or placed is None:
        raise RuntimeError(
            f"a tensor of shape {shape} on no mesh (or a view of one) has no pieces to load; mark "
            "it first: xs.mark_sharding(tensor, mesh, spec)"
        )
    if marks.sharding_type(want, len(shape)) == marks.ShardingType.REPLICATED:
        raise RuntimeError(
            f"a tensor of shape {shape} that is whole on every device has no pieces; write to it "
            "instead: tensor.copy_(values)"
        )
    given = {shard.shard_device: shard for shard in shards}
    chunks = marks.chunks(tensor)
    pieces = [p for p in _pieces(want, shape, chunks) if p[0].process_index == jax.process_index()]
    names = [name_of(device) for device, _, _ in pieces]
    if sorted(given) != sorted(names) or len(shards) != len(names):
        raise RuntimeError(
            f"{len(shards)} pieces for devices {sorted(given)} do not make a tensor on "
            f"{len(names)} devices of this process, {sorted(names)}; give one for each"
        )
    size = _size(want, shape, chunks)
    wrong = [s.shard_device for s in shards if tuple(s.data.shape) != size]
    if wrong:
        raise RuntimeError(
            f"each piece of a tensor of shape {shape} laid out by {want.spec} has the shape "
            f"{size}, filling included; those of {', '.join(wrong)} have "
            f"{sorted({tuple(s.data.shape) for s in shards})}"
        )
    dtype, physical = tensor.dtype, tensor._aval.physical
    blocks = {
        device: _to_physical(given[name_of(device)].data, dtype, physical)
        for device, _, _ in pieces
    }
    if want is placed:
        with jax.enable_x64(True):
            arrays = [jax.device_put(np.array(array), device) for device, array in blocks.items()]
        whole = jax.make_array_from_single_device_arrays(shape, placed, arrays)
    else:
        host = np.empty(shape, physical)
        for device, index, _ in pieces:
            host[index] = blocks[device][tuple(slice(0, i.stop - i.start) for i in index)]
        with jax.enable_x64(True):
            whole = jax.device_put(host, placed)
    _write(tensor, whole, sum(a.nbytes for a in blocks.values()))


def _load_uneven(tensor: lazy_tensor.LazyTensor, shards: Sequence[XLAShard]) -> None:
    u = reading.held(tensor)
    given = {shard.shard_device: shard.data for shard in shards}
    dtype, physical = tensor.dtype, tensor._aval.physical
    made = uneven_shards.put(u, given, name_of, lambda t: _to_physical(t, dtype, physical))
    _write(tensor, made, sum(shard.data.nbytes for shard in shards))


def _to_physical(t: torch.Tensor, dtype: torch.dtype, physical: Any) -> np.ndarray:
    array = to_numpy(t.detach().cpu().to(dtype))
    return lazy_tensor.narrow(array, physical, dtype) if array.dtype != physical else array


def _write(tensor: lazy_tensor.LazyTensor, whole: Any, count: int) -> None:
    metrics.record_transfer("host_to_device", count, metrics.user_location())
    lazy_tensor.write(tensor, Value.of(whole))
    torch.autograd.graph.increment_version(tensor)


def name_of(device: DeviceLike) -> str:
    """A device as torch_xla writes it: `"CPU:3"`."""
    return f"{device.platform.upper()}:{marks.ordinal(device)}"


def _pieces(
    want: marks.Sharding, shape: tuple[int, ...], chunks: marks.Chunks
) -> list[tuple[Any, Any, int]]:
    """Each device with the part of the whole that is its own, and its number among its copies."""
    devices = {marks.ordinal(device): device for device in mesh_of(want).devices.flat}
    grid = marks.groups(want, len(shape))
    told = dict(chunks)
    counts = grid.shape[:-1]
    ends = [
        list(itertools.accumulate(told[axis]))
        if axis in told
        else [min((at + 1) * step, extent) for at in range(count)]
        for axis, (extent, count, step) in enumerate(
            zip(shape, counts, _size(want, shape, ()), strict=True)
        )
    ]
    found = []
    for block in np.ndindex(*counts):
        index = tuple(
            slice(own[at - 1] if at else 0, own[at], 1) for own, at in zip(ends, block, strict=True)
        )
        found += [(devices[n], index, replica) for replica, n in enumerate(grid[block].tolist())]
    return sorted(found, key=lambda piece: marks.ordinal(piece[0]))


def _size(want: marks.Sharding, shape: tuple[int, ...], chunks: marks.Chunks) -> tuple[int, ...]:
    """The shape of every piece, filling included."""
    blocks = marks.groups(want, len(shape)).shape[:-1]
    even = (-(-extent // count) for extent, count in zip(shape, blocks, strict=True))
    largest = {axis: max(sizes) for axis, sizes in chunks}
    return tuple(largest[axis] if axis in largest else step for axis, step in enumerate(even))


def _cut(piece: Any, index: tuple[slice, ...], size: tuple[int, ...]) -> np.ndarray:
    """The part of the whole at `index`, out of a device's buffer that covers it, filled up."""
    data = np.asarray(piece.data)
    starts = [place.start or 0 for place in piece.index]
    inside = tuple(
        slice(want.start - start, want.stop - start)
        for want, start in zip(index, starts, strict=True)
    )
    data = data[inside]
    missing = [(0, full - have) for full, have in zip(size, data.shape, strict=True)]
    return np.pad(data, missing) if any(after for _, after in missing) else data


def _to_host(data: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    metrics.record_transfer("device_to_host", data.nbytes, metrics.user_location())
    return from_numpy(np.array(data, copy=True), dtype)
