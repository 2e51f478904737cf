"""A tensor's shards, one per device of this process: snapshots to read, and to load back.

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
the devices' own memory. Where a mark does not divide an axis, the last shards are padded with zeros
to the size of the others; `indices` and `unpadded_data` are without the padding. Shards of a tensor
in blocks of unequal sizes have no padding (`uneven_shards`).
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
    """One device's shard of a tensor.

    Attributes:
        data: a copy of the shard on the CPU, padded with zeros where the axis does not divide.
        indices: of the shard in the global tensor, one slice per axis, without padding; `...` if
            the tensor is replicated.
        shard_device: the device, such as `"CPU:3"`.
        replica_id: 0 for the first device with this shard, 1 for the next.

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
        """The device's index in `jax.devices()`."""
        return int(self.shard_device.rpartition(":")[2])

    @property
    def unpadded_data(self) -> torch.Tensor:
        """`data` without its padding; set it to change these elements only."""
        return self.data[self._valid()]

    @unpadded_data.setter
    def unpadded_data(self, t: torch.Tensor) -> None:
        self.data[self._valid()] = t

    def _valid(self) -> Any:
        if isinstance(self.indices, EllipsisType):
            return ...
        return tuple(slice(0, index.stop - index.start) for index in self.indices)


def local_shards(tensor: lazy_tensor.LazyTensor) -> list[XLAShard] | None:
    """Copy a tensor's shards to the CPU, in the order of `jax.devices()`.

    Args:
        tensor: on the `jax` device.

    Returns:
        One shard per device of this process; None for a value that is not computed yet and not
        marked. A marked one is computed now.
    """
    if marks.is_recorded(tensor) and marks.marked(tensor) is None:
        recorder().check_execution()  # the body of a call never has values
        return None
    recorder().refuse("the value of a tensor")
    array = reading.stored_array(tensor)
    if isinstance(array, UnevenArray):
        return [
            XLAShard(
                _to_host(np.asarray(shard.data), tensor.dtype),
                [slice(*axis.indices(n)) for axis, n in zip(shard.index, array.shape, strict=True)],
                name_of(shard.device),
                shard.replica_id,
            )
            for shard in uneven_shards.valid_shards(array)
        ]
    want = marks.requested_sharding(tensor)
    if want is None:
        want = array.sharding
    if not isinstance(want, marks.Sharding):
        (shard,) = array.addressable_shards
        data = _to_host(np.asarray(shard.data), tensor.dtype)
        return [XLAShard(data, ..., name_of(shard.device), 0)]
    buffers = {shard.device: shard for shard in array.addressable_shards}
    shards, shape, chunks = [], tuple(tensor.shape), marks.chunks(tensor)
    is_replicated = marks.sharding_type(want, tensor.dim()) == marks.ShardingType.REPLICATED
    size = _size(want, shape, chunks)
    for device, index, replica in _shard_indices(want, shape, chunks):
        if device in buffers:
            data = _to_host(_padded_slice(buffers[device], index, size), tensor.dtype)
            indices: Any = ... if is_replicated else list(index)
            replica_id = marks.ordinal(device) if is_replicated else replica
            shards.append(XLAShard(data, indices, name_of(device), replica_id))
    return shards


def load(tensor: lazy_tensor.LazyTensor, shards: Sequence[XLAShard]) -> None:
    """Replace a tensor's elements by those of its shards.

    Args:
        tensor: marked with a layout that splits it.
        shards: one per device of this process, in any order, of the sizes `local_shards` gives.

    Raises:
        RuntimeError: the tensor is not split, is a view, or shards are missing or have other sizes.
    """
    shape = tuple(tensor.shape)
    if isinstance(tensor._storage.value.array, UnevenArray) and not tensor._chain.ops:
        _load_uneven(tensor, shards)
        return
    want, placed = marks.requested_sharding(tensor), marks.placed(tensor)
    if want is None or placed is None:
        raise RuntimeError(
            f"a tensor of shape {shape} on no mesh (or a view of one) has no shards to load; mark "
            "it first: xs.mark_sharding(tensor, mesh, spec)"
        )
    if marks.sharding_type(want, len(shape)) == marks.ShardingType.REPLICATED:
        raise RuntimeError(
            f"a tensor of shape {shape} that is replicated has no shards to load; write to it "
            "instead: tensor.copy_(values)"
        )
    by_device = {shard.shard_device: shard for shard in shards}
    chunks = marks.chunks(tensor)
    local_indices = [
        (device, index)
        for device, index, _ in _shard_indices(want, shape, chunks)
        if device.process_index == jax.process_index()
    ]
    names = [name_of(device) for device, _ in local_indices]
    if sorted(by_device) != sorted(names) or len(shards) != len(names):
        raise RuntimeError(
            f"{len(shards)} shards for devices {sorted(by_device)} do not make a tensor on "
            f"{len(names)} devices of this process, {sorted(names)}; pass one for each"
        )
    size = _size(want, shape, chunks)
    wrong = [s.shard_device for s in shards if tuple(s.data.shape) != size]
    if wrong:
        raise RuntimeError(
            f"each shard of a tensor of shape {shape} sharded as {want.spec} has the shape "
            f"{size}, padding included; those of {', '.join(wrong)} have "
            f"{sorted({tuple(s.data.shape) for s in shards})}"
        )
    dtype, physical = tensor.dtype, tensor._aval.physical
    blocks = {
        device: _to_physical(by_device[name_of(device)].data, dtype, physical)
        for device, _ in local_indices
    }
    if want is placed:
        with jax.enable_x64(True):
            arrays = [jax.device_put(np.array(array), device) for device, array in blocks.items()]
        full = jax.make_array_from_single_device_arrays(shape, placed, arrays)
    else:
        host = np.empty(shape, physical)
        for device, index in local_indices:
            host[index] = blocks[device][tuple(slice(0, i.stop - i.start) for i in index)]
        with jax.enable_x64(True):
            full = jax.device_put(host, placed)
    _write(tensor, full, sum(a.nbytes for a in blocks.values()))


def _load_uneven(tensor: lazy_tensor.LazyTensor, shards: Sequence[XLAShard]) -> None:
    u = reading.stored_array(tensor)
    by_device = {shard.shard_device: shard.data for shard in shards}
    dtype, physical = tensor.dtype, tensor._aval.physical
    array = uneven_shards.put(u, by_device, name_of, lambda t: _to_physical(t, dtype, physical))
    _write(tensor, array, sum(shard.data.nbytes for shard in shards))


def _to_physical(t: torch.Tensor, dtype: torch.dtype, physical: Any) -> np.ndarray:
    array = to_numpy(t.detach().cpu().to(dtype))
    return lazy_tensor.narrow(array, physical, dtype) if array.dtype != physical else array


def _write(tensor: lazy_tensor.LazyTensor, array: Any, count: int) -> None:
    metrics.record_transfer("host_to_device", count, metrics.user_location())
    lazy_tensor.write(tensor, Value.of(array))
    torch.autograd.graph.increment_version(tensor)


def name_of(device: DeviceLike) -> str:
    """A device as torch_xla writes it: `"CPU:3"`."""
    return f"{device.platform.upper()}:{marks.ordinal(device)}"


def _shard_indices(
    want: marks.Sharding, shape: tuple[int, ...], chunks: marks.Chunks
) -> list[tuple[Any, Any, int]]:
    """Each device with the index of its shard in the global tensor, and its replica id."""
    devices = {marks.ordinal(device): device for device in mesh_of(want).devices.flat}
    grid = marks.groups(want, len(shape))
    sizes_by_axis = dict(chunks)
    counts = grid.shape[:-1]
    ends = [
        list(itertools.accumulate(sizes_by_axis[axis]))
        if axis in sizes_by_axis
        else [min((at + 1) * step, extent) for at in range(count)]
        for axis, (extent, count, step) in enumerate(
            zip(shape, counts, _size(want, shape, ()), strict=True)
        )
    ]
    shards = []
    for block in np.ndindex(*counts):
        index = tuple(
            slice(stops[at - 1] if at else 0, stops[at], 1)
            for stops, at in zip(ends, block, strict=True)
        )
        shards += [(devices[n], index, replica) for replica, n in enumerate(grid[block].tolist())]
    return sorted(shards, key=lambda shard: marks.ordinal(shard[0]))


def _size(want: marks.Sharding, shape: tuple[int, ...], chunks: marks.Chunks) -> tuple[int, ...]:
    """The shape of every shard, padding included."""
    blocks = marks.groups(want, len(shape)).shape[:-1]
    even = (-(-extent // count) for extent, count in zip(shape, blocks, strict=True))
    largest = {axis: max(sizes) for axis, sizes in chunks}
    return tuple(largest[axis] if axis in largest else step for axis, step in enumerate(even))


def _padded_slice(buffer: Any, index: tuple[slice, ...], size: tuple[int, ...]) -> np.ndarray:
    """The elements at `index` of the global tensor, out of a buffer that has them, padded."""
    data = np.asarray(buffer.data)
    starts = [axis.start or 0 for axis in buffer.index]
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
