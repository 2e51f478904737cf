"""`zeros`, `ones`, `empty`, `full`, `rand` and `randn` with placements.

The elements are those of the torch function of the same name on the `jax` device, whatever the
placements; each device computes its own shard.

>>> from isoshard.torch_bridge.distributed.device_mesh import init_device_mesh
>>> from torch.distributed.tensor import Shard
>>> mesh = init_device_mesh("jax", (4,))
>>> _ = torch.manual_seed(0)
>>> rows = randn(4, 3, device_mesh=mesh, placements=[Shard(0)])
>>> _ = torch.manual_seed(0)
>>> bool((rows == torch.randn(4, 3, device="jax")).all())
True
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from isoshard.torch_bridge.common.argument_types import MeshLike
from isoshard.torch_bridge.distributed import tensor_placements
from isoshard.torch_bridge.tensors.tensor import XLAShardedTensor


def _factory(make: Callable[..., torch.Tensor], name: str) -> Callable[..., XLAShardedTensor]:
    def factory(
        *size: Any,
        dtype: torch.dtype | None = None,
        layout: torch.layout = torch.strided,
        requires_grad: bool = False,
        device_mesh: Any = None,
        placements: Sequence[Any] | None = None,
    ) -> XLAShardedTensor:
        return _distributed(
            make, _shape(size), dtype, layout, requires_grad, device_mesh, placements
        )

    factory.__name__ = factory.__qualname__ = make.__name__
    factory.__doc__ = f"""A tensor of {name}, in a layout.

    Args:
        size: global: integers, or one sequence of them.
        dtype: by default torch's.
        layout: only `torch.strided`.
        requires_grad: whether it requires a gradient.
        device_mesh: a mesh in any form; by default the current one.
        placements: one `Shard` or `Replicate` per mesh dimension; replicated if not
            given.

    Returns:
        The tensor; nothing is made before it is needed.

    Raises:
        ValueError: there is not one placement per mesh dimension, or `layout` is another.
        IndexError: a `Shard` names an axis that the tensor does not have.
        NotImplementedError: a placement is `Partial`.
        RuntimeError: no mesh is passed or current.

    Example:
        >>> from isoshard.torch_bridge.distributed import init_device_mesh
        >>> from torch.distributed.tensor import Shard
        >>> mesh = init_device_mesh("jax", (4,))
        >>> t = {make.__name__}(8, 3, device_mesh=mesh, placements=[Shard(0)])
        >>> t.shape, t.placements
        (torch.Size([8, 3]), (Shard(dim=0),))
    """
    return factory


zeros = _factory(torch.zeros, "zeros")
ones = _factory(torch.ones, "ones")
empty = _factory(torch.empty, "no particular elements")
rand = _factory(torch.rand, "random numbers, uniform in [0, 1)")
randn = _factory(torch.randn, "random numbers, normal")


def full(
    size: Sequence[int],
    fill_value: complex,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: MeshLike = None,
    placements: Sequence[Any] | None = None,
) -> XLAShardedTensor:
    """A tensor of one number, in a layout.

    Args:
        size: global.
        fill_value: the number.
        dtype: by default that of `fill_value`.
        layout: only `torch.strided`.
        requires_grad: whether it requires a gradient.
        device_mesh: a mesh in any form; by default the current one.
        placements: one `Shard` or `Replicate` per mesh dimension; replicated if not
            given.

    Returns:
        The tensor; nothing is made before it is needed.

    Raises:
        ValueError: there is not one placement per mesh dimension, or `layout` is another.
        IndexError: a `Shard` names an axis that the tensor does not have.
        NotImplementedError: a placement is `Partial`.
        RuntimeError: no mesh is passed or current.

    Example:
        >>> from isoshard.torch_bridge.distributed import init_device_mesh
        >>> from torch.distributed.tensor import Shard
        >>> full((4,), 7.0, device_mesh=init_device_mesh("jax", (4,)), placements=[Shard(0)])
        tensor([7., 7., 7., 7.], device='jax:0', sharding=P('0',))
    """

    def make(shape: Any, **options: Any) -> torch.Tensor:
        return torch.full(shape, fill_value, **options)

    return _distributed(make, tuple(size), dtype, layout, requires_grad, device_mesh, placements)


def _shape(size: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else tuple(size)


def _distributed(
    make: Callable[..., torch.Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype | None,
    layout: torch.layout,
    requires_grad: bool,
    device_mesh: Any,
    placements: Sequence[Any] | None,
) -> XLAShardedTensor:
    if layout != torch.strided:
        raise ValueError(f"layout={layout} is not possible here; only torch.strided is")
    mesh_placements = tensor_placements.layout(shape, device_mesh, placements)
    tensor = tensor_placements.mark(make(shape, dtype=dtype, device="jax"), mesh_placements)
    return tensor.requires_grad_() if requires_grad else tensor
