"""The SPMD API: a mesh, and tensors marked with how they lie on it.

A model written for one device is sharded by marking a few of its tensors; XLA's partitioner
completes the rest.

>>> import torch, isoshard.torch_bridge as xs
>>> mesh = xs.Mesh(range(8), (4, 2), ("x", "y"))
>>> linear = torch.nn.Linear(32, 10).to("jax")
>>> _ = xs.mark_sharding(linear.weight, mesh, (1, 0))
>>> linear.weight.sharding_spec
'{devices=[2,4]0,2,4,6,1,3,5,7}'

Source: the RFC "XLAShardedTensor and mark_sharding" of PyTorch/XLA.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch

from isoshard.core.errors import DeviceError, ShardingError, SpecError
from isoshard.core.op_sharding import to_op_sharding
from isoshard.core.spec import named_sharding, same_layout
from isoshard.core.tiles import Tiles

from .tensor import XLAShardedTensor, annotate


class Mesh:
    """Devices as a grid with named axes, in torch_xla's words.

    Args:
        device_ids: positions in `jax.devices()`, in the order in which they fill the grid (the last
            axis fastest).
        mesh_shape: devices along each axis.
        axis_names: one name per axis; by default the axes are called `"0"`, `"1"`, ..

    Raises:
        ShardingError: numbers, shape and names do not belong together.
        DeviceError: there are too few devices.

    >>> mesh = Mesh(np.arange(8), (4, 2), ("x", "y"))
    >>> mesh.get_logical_mesh()
    array([[0, 1],
           [2, 3],
           [4, 5],
           [6, 7]])
    >>> mesh.shape()
    OrderedDict([('x', 4), ('y', 2)])
    """

    def __init__(
        self,
        device_ids: Sequence[int] | np.ndarray,
        mesh_shape: tuple[int, ...],
        axis_names: tuple[str, ...] | None = None,
    ):
        """See the class."""
        self.device_ids = np.asarray(list(device_ids), dtype=int).reshape(-1)
        self.mesh_shape = tuple(int(extent) for extent in mesh_shape)
        self.axis_names = tuple(axis_names) if axis_names is not None else None
        self._check()
        names = self.axis_names or tuple(str(axis) for axis in range(len(self.mesh_shape)))
        devices = np.array(jax.devices(), object)[self.device_ids].reshape(self.mesh_shape)
        auto = (jax.sharding.AxisType.Auto,) * len(names)
        self._jax_mesh = jax.sharding.Mesh(devices, names, axis_types=auto)

    def _check(self) -> None:
        ids, size = self.device_ids, int(np.prod(self.mesh_shape))
        wrong = []
        if len(ids) != size:
            wrong.append(f"{len(ids)} device ids for a grid of {size}")
        if len(set(ids.tolist())) < len(ids):
            wrong.append(f"a device id is given twice in {ids.tolist()}")
        names = self.axis_names
        if names is not None and len(names) != len(self.mesh_shape):
            wrong.append(f"{len(names)} axis names for {len(self.mesh_shape)} axes")
        if names is not None and len(set(names)) < len(names):
            wrong.append(f"an axis name is given twice in {names}")
        if wrong:
            raise ShardingError(
                f"no mesh of shape {self.mesh_shape} with axis names {names}: {'; '.join(wrong)}. "
                "Give every device once, one extent and one name per axis: "
                "Mesh(range(8), (2, 4), ('x', 'y'))."
            )
        have = len(jax.devices())
        if len(ids) and (ids.max() >= have or ids.min() < 0):
            raise DeviceError(
                f"a mesh over device ids {ids.tolist()} needs {ids.max() + 1} devices, there are "
                f"{have} ({jax.default_backend()}). Make it smaller, or try it on virtual devices: "
                f"call isoshard.simulate_devices({ids.max() + 1}) before anything else."
            )

    def size(self) -> int:
        """How many devices it has."""
        return len(self.device_ids)

    def shape(self) -> collections.OrderedDict[str | int, int]:
        """Devices along each axis, by name (or index, if it has no names)."""
        return collections.OrderedDict(
            zip(self.axis_names or range(len(self.mesh_shape)), self.mesh_shape, strict=True)
        )

    def get_logical_mesh(self) -> np.ndarray:
        """The device ids as a grid."""
        return self.device_ids.reshape(self.mesh_shape)

    def get_axis_name_idx(self, name: str) -> int | None:
        """The index of the axis with this name, or None."""
        names = self.axis_names or ()
        return names.index(name) if name in names else None

    def get_jax_mesh(self) -> jax.sharding.Mesh:
        """The same mesh for JAX."""
        return self._jax_mesh

    def __repr__(self) -> str:
        """As the constructor."""
        return f"Mesh({self.device_ids.tolist()}, {self.mesh_shape}, {self.axis_names})"


@dataclasses.dataclass(frozen=True)
class ShardingSpec:
    """A mesh and a spec that wait for tensors (a data loader's, for instance).

    Attributes:
        mesh: an `xs.Mesh`, or a `jax.sharding.Mesh`.
        partition_spec: one entry per tensor axis.
    """

    mesh: Any
    partition_spec: Any

    def can_apply(self, t: torch.Tensor) -> bool:
        """Whether the spec has one entry per axis of `t`."""
        return t.dim() == len(self.partition_spec)

    def apply(self, t: torch.Tensor) -> XLAShardedTensor:
        """Mark `t`; see `mark_sharding`."""
        return mark_sharding(t, self.mesh, self.partition_spec)

    def xla_spec(self, t: torch.Tensor) -> str | None:
        """The OpSharding string for `t`, or None if the spec does not fit its rank."""
        if not self.can_apply(t):
            return None
        sharding = named_sharding(self.partition_spec, self.mesh, t.dim(), shape=t.shape)
        return to_op_sharding(Tiles.from_sharding(sharding, t.dim()))


def mark_sharding(t: torch.Tensor, mesh: Any, partition_spec: Any) -> XLAShardedTensor:
    """Mark how a tensor lies on a mesh.

    The mark holds at once and for the life of the tensor's memory; data moves with the next
    execution. In a step being recorded it is a constraint for XLA's partitioner.

    Args:
        t: a tensor, parameter or activation on the `jax` device.
        mesh: an `xs.Mesh`, or a `jax.sharding.Mesh` with Auto axes.
        partition_spec: one entry per axis of `t`: an axis index or name of the mesh, None, or a
            tuple of those (first is outermost); also a PartitionSpec.

    Returns:
        `t` itself.

    Raises:
        SpecError: an entry is no axis of the mesh, an axis is used twice, or the ranks differ.
        UnevenError: an axis of `t` does not divide.
        ShardingError: `t` is on another device, or is marked differently already.
    """
    if not isinstance(t, XLAShardedTensor):
        raise ShardingError(
            f"mark_sharding takes a tensor on the jax device, and this one of shape "
            f"{tuple(t.shape)} is on {t.device}. Move it with t.to('jax') (a module with "
            "module.to('jax')), or use isoshard.shard(t, mesh, spec), which does both."
        )
    if isinstance(partition_spec, Sequence) and not isinstance(
        partition_spec, str | jax.sharding.PartitionSpec
    ):
        if len(partition_spec) != t.dim():
            raise SpecError(
                f"spec {tuple(partition_spec)} has {len(partition_spec)} entries for a tensor of "
                f"rank {t.dim()} (shape {tuple(t.shape)}); give one entry per axis, None for an "
                "axis that stays whole"
            )
    sharding = named_sharding(partition_spec, mesh, t.dim(), shape=tuple(t.shape))
    present = t._storage.annotation if not t._chain.ops else None
    if present is not None and not _same(present, sharding, t.dim()):
        raise ShardingError(
            f"a tensor of shape {tuple(t.shape)} is marked {present.spec} already and cannot be "
            f"marked {sharding.spec} as well; call clear_sharding(t) first, or isoshard.reshard"
        )
    if present is None:
        annotate(t, sharding)
    return t


def clear_sharding(t: torch.Tensor) -> torch.Tensor:
    """Forget a tensor's mark: it becomes whole on every device of its mesh.

    Args:
        t: on the `jax` device.

    Returns:
        `t` itself.
    """
    if isinstance(t, XLAShardedTensor) and t._storage.annotation is not None:
        present = t._storage.annotation
        t._storage.annotation = None
        annotate(t, jax.sharding.NamedSharding(present.mesh, jax.sharding.PartitionSpec()))
        t._storage.annotation = None
    return t


def _same(a: jax.sharding.NamedSharding, b: jax.sharding.NamedSharding, ndim: int) -> bool:
    return a.mesh.axis_sizes == b.mesh.axis_sizes and same_layout(a, b, ndim)
