"""`loss_parallel`: cross entropy of logits whose classes are split over the mesh.

>>> import torch, isoshard.torch_bridge as xs
>>> mesh = xs.Mesh(range(8), (8,), ("tp",))
>>> logits = xs.mark_sharding(torch.zeros(4, 16, device="jax"), mesh, (None, "tp"))
>>> with loss_parallel():
...     torch.nn.functional.cross_entropy(logits, torch.zeros(4, device="jax", dtype=int)).cpu()
tensor(2.7726)

On the `jax` device nothing has to be enabled: the program sends the largest logit, the sum of
exponentials and the target's logit of each row, and no device gathers the classes. The context
exists for scripts that have it, and checks that logits with a known sharding are split along their
classes. Label smoothing, class weights, probabilities as targets and every reduction
work on any mesh, inside and outside, and `backward()` may be called outside.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from isoshard.core.layout.spec import axis_names
from isoshard.torch_bridge.layout.view_layouts import sharding_of_view
from isoshard.torch_bridge.tensors.tensor import XLAShardedTensor


@contextlib.contextmanager
def loss_parallel() -> Iterator[None]:
    """Check that cross entropy is of logits split along their classes.

    Raises:
        ValueError: inside, `cross_entropy` gets logits that are marked otherwise.

    Example:
        >>> import isoshard.torch_bridge as xs
        >>> logits = torch.zeros(4, 16, device="jax", requires_grad=True)
        >>> logits = xs.mark_sharding(logits, xs.get_1d_mesh("tp"), (None, "tp"))
        >>> with loss_parallel():
        ...     labels = torch.zeros(4, dtype=int, device="jax")
        ...     torch.nn.functional.cross_entropy(logits, labels).backward()
        >>> logits.grad[0, :2].cpu()
        tensor([-0.2344,  0.0156])
    """
    with _Checking():
        yield


class _Checking(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        if func is torch.nn.functional.cross_entropy:
            logits = args[0] if args else named.get("input")
            if isinstance(logits, XLAShardedTensor):
                _check(logits)
        return func(*args, **named)


def _check(logits: XLAShardedTensor) -> None:
    sharding = sharding_of_view(logits)
    if sharding is None:  # recorded: XLA decides
        return
    spec = sharding.spec
    axis = 1 if logits.dim() > 1 else 0
    if not axis_names((*spec, *[None] * logits.dim())[axis]):
        raise ValueError(
            f"loss_parallel is for logits split along their classes, axis {axis}, and these of "
            f"shape {tuple(logits.shape)} are sharded as {spec}; give the last layer "
            "ColwiseParallel(output_layouts=Shard(-1)), or leave loss_parallel out"
        )
