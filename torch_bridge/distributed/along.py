"""Shardings over one dimension of a mesh; the other dimensions are unchanged.

A tensor-parallel style is over one dimension of the mesh, and of a (dp, tp) mesh the other one is
used by data parallelism: `Replicate()` along `tp` must not gather the batch that `dp` splits.

>>> import torch, isoshard.torch_bridge as xs
>>> from torch.distributed.tensor import Replicate, Shard
>>> from isoshard.torch_bridge.distributed.device_mesh import init_device_mesh
>>> mesh = init_device_mesh("jax", (2, 4), mesh_dim_names=("dp", "tp"))
>>> weight = xs.mark_sharding(torch.ones(8, 8, device="jax"), mesh.get_xs_mesh(), ("dp", None))
>>> shard_in_place(weight, mesh["tp"], Shard(0))
>>> weight.partition_spec
P(('dp', 'tp'),)

Parameters have a known sharding, so their spec is rewritten. A value inside a step
has the sharding that XLA chooses, and the program constrains only the one dimension, or
along those of a part of the mesh: it is a `jax.shard_map` over these axes whose function does
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import torch
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.errors import ShardingError
from isoshard.core.layout.axis_types import same_grid
from isoshard.core.layout.spec import axis_names, named_sharding, same_layout
from isoshard.core.runtime.caches import cached
from isoshard.torch_bridge.common.argument_types import (
    DeviceTensor,
    MeshLike,
    Opaque,
    PlacementLike,
)
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.recording import tape as tapes
from isoshard.torch_bridge.engine.recording.tape import Recipe
from isoshard.torch_bridge.engine.values import sharding_ids
from isoshard.torch_bridge.engine.values.value import Aval
from isoshard.torch_bridge.layout import graph_calls, marks
from isoshard.torch_bridge.spmd.gradients import mark_sharding_with_gradients
from isoshard.torch_bridge.spmd.manual_recipes import Axes, block_counts, mapped, spec_along
from isoshard.torch_bridge.spmd.marking import checked
from isoshard.torch_bridge.spmd.uneven import even_with_warning

from .device_mesh import DeviceMesh, device_mesh_of


def require_1d_mesh(device_mesh: MeshLike, caller: str) -> DeviceMesh:
    """A mesh of one dimension, in any form.

    Args:
        device_mesh: a `DeviceMesh` or a part of one, an `xs.Mesh`, a `jax.sharding.Mesh`, or
            torch's `DeviceMesh`; the current mesh for None.
        caller: the function that was called, for the message.

    Raises:
        ValueError: it has more dimensions, or none.
    """
    mesh = device_mesh_of(device_mesh)
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or ()
        hint = f'mesh["{names[-1]}"]' if names else 'mesh["tp"] of a mesh with mesh_dim_names'
        raise ValueError(
            f"{caller} works along one dimension of a mesh, and {mesh} has {mesh.ndim}; pass "
            f"one of them, as {hint}"
        )
    return mesh


def shard_in_place(t: torch.Tensor, device_mesh: DeviceMesh, placement: PlacementLike) -> None:
    """Shard a parameter or buffer over one dimension, in place.

    Args:
        t: on the `jax` device.
        device_mesh: of one dimension.
        placement: `Shard(axis)` or `Replicate()`.

    Raises:
        IndexError: the tensor has no such axis.
        ShardingError: it is on another device, or sharded over another mesh.
        ValueError: the placement is `Partial`.
    """
    names = device_mesh.axis_names(0)
    axis = _axis(placement, t.dim())
    mesh = device_mesh.get_jax_mesh()
    tensor, _ = checked(t, mesh, (None,) * t.dim(), "a layout along one dimension")
    entries: list[tuple[str, ...]] = [()] * t.dim()
    present = marks.requested_sharding(tensor)
    if present is not None and _splits(present):
        if not same_grid(present.mesh, mesh):
            raise ShardingError(
                f"a tensor of shape {tuple(t.shape)} is sharded as {present.spec} over "
                f"{present.mesh} and cannot be sharded over {device_mesh} as well; use parts of "
                "one mesh, or call xs.clear_sharding(t) first"
            )
        for index, entry in enumerate(present.spec):
            entries[index] = tuple(name for name in axis_names(entry) if name not in names)
    if axis is not None:
        entries[axis] += names
    requested = named_sharding(P(*(entry or None for entry in entries)), mesh, t.dim())
    if present is not None and same_grid(present.mesh, mesh):
        if same_layout(present, requested, t.dim()):
            return
    even, uneven = even_with_warning(requested, t.shape)
    marks.annotate(tensor, even, requested=uneven)


def constrain(t: torch.Tensor, device_mesh: DeviceMesh, placement: PlacementLike) -> torch.Tensor:
    """The same elements as a new tensor, sharded over one dimension, as is its gradient.

    Args:
        t: on the `jax` device; it is not modified.
        device_mesh: of one dimension.
        placement: `Shard(axis)` or `Replicate()`. `Partial()` is a no-op: a tensor here is
            global, the sum over the devices.

    Returns:
        The new tensor. Where `device_mesh` is a part of a mesh, its `placements` are available once
        it is computed.

    Raises:
        IndexError: the tensor has no such axis.
        ShardingError: it is on another device.
        ValueError: the placement is not `Shard` or `Replicate`.
    """
    if placement.is_partial("sum"):
        return t
    axis = _axis(placement, t.dim())
    mesh, names = device_mesh.get_jax_mesh(), device_mesh.axis_names(0)
    checked(t, mesh, (None,) * t.dim(), "a parallel style")
    if not device_mesh.is_part():
        spec: list[Any] = [None] * t.dim()
        if axis is not None:
            spec[axis] = names
        return mark_sharding_with_gradients(t, mesh, P(*spec))
    spec = [names if index == axis else None for index in range(t.dim())]
    target = AlongAxes(mesh, names, P(*spec))
    result: Any = _Along.apply(t, target)
    return result


class AlongAxes(NamedTuple):
    """The sharding of a tensor over some axes of a mesh; the others are unconstrained.

    Args:
        mesh: the devices.
        names: the axes.
        spec: what holds along them.
    """

    mesh: jax.sharding.Mesh
    names: Axes
    spec: P


def constrain_over_axes(t: DeviceTensor, target: AlongAxes) -> Any:
    """The same elements as a new tensor, sharded over some axes; outside autograd.

    Args:
        t: on the `jax` device; it is not modified.
        target: how. An axis of `t` that the mesh axes do not divide is replicated.
    """
    return graph_calls.record_or_trace(_constrain_over_axes, graph_calls.same_shape, t, target)


def _constrain_over_axes(t: Any, target: AlongAxes) -> Any:
    mesh, names, spec = target
    blocks = block_counts(t.dim(), mesh, names, spec)
    sides = zip(t.shape, blocks, spec_along(spec, names), strict=False)
    even = P(*(entry if size % count == 0 else None for size, count, entry in sides))
    mesh_id = sharding_ids.intern(NamedSharding(mesh, P()))
    tape = tapes.recorder()
    value = lazy_tensor.read(t)
    if isinstance(tape, tapes.Tape) and tape.joins(mesh_id):
        tape.marks.add(mesh_id)
    (result,) = tape.record(_constraint(mesh, names, even), (value,))
    return lazy_tensor.fresh(Aval.contiguous(tuple(t.shape), t.dtype), result)


def constraint(hook: Opaque, *key: Any) -> Any:
    """A hook that only constrains, for `scan_layers`, which runs one layer's hooks for all.

    Args:
        hook: of a module.
        key: what it depends on; equal for two hooks that do the same.
    """
    return Constraint(hook, key)


class Constraint:
    """A hook that only constrains shardings; dynamo follows it, see `dynamo_layouts`.

    Attributes:
        hook: what is called.
        constraint_key: what it depends on.
    """

    def __init__(self, hook: Callable[..., Any], key: tuple[Any, ...]):
        """See the class."""
        self.hook = hook
        self.constraint_key = key

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the hook."""
        return self.hook(*args, **kwargs)


class _Along(torch.autograd.Function):
    """`_Along.apply(tensor, target)`: a constraint on tensor and gradient."""

    @staticmethod
    def forward(ctx: Any, t: Any, target: AlongAxes) -> torch.Tensor:
        ctx.target = target
        return constrain_over_axes(t, target)

    @staticmethod
    def backward(ctx: Any, *gradient: Any) -> Any:
        return _Along.apply(gradient[0], ctx.target), None


@cached(1024)
def _constraint(mesh: jax.sharding.Mesh, names: Axes, spec: P) -> Recipe:
    """The program entry that constrains a value over some axes of the mesh."""
    run = mapped(lambda shard: shard, mesh, names, spec, spec)
    return Recipe("mark_along", lambda arrays, _scalars, _key: [run(arrays[0])], 1)


def _axis(placement: Any, ndim: int) -> int | None:
    """The tensor axis that a placement splits; None for `Replicate`."""
    if placement.is_replicate():
        return None
    dim = getattr(placement, "dim", None)
    if dim is None or not placement.is_shard():
        raise ValueError(
            f"{placement} is not a placement of a global tensor; use Shard(axis) or Replicate"
        )
    if not -ndim <= dim < ndim:
        raise IndexError(
            f"{placement} splits axis {dim}, and the tensor has {ndim}: {list(range(ndim))}"
        )
    return cast(int, dim % ndim)


def _splits(sharding: NamedSharding) -> bool:
    return any(axis_names(entry) for entry in sharding.spec)
