"""`visualize_sharding`: print which device has which shard."""

from __future__ import annotations

from isoshard.core.pictures.visualize import visualize
from isoshard.torch_bridge.common.argument_types import DeviceTensor


def visualize_sharding(dtensor: DeviceTensor, header: str = "", use_rich: bool = False) -> None:
    """Print which device has which shard of a tensor, of any rank.

    Args:
        dtensor: a tensor on the `jax` device that is sharded, or whatever `isoshard.visualize`
            draws.
        header: printed before it.
        use_rich: in colours.

    Example:
        >>> import torch, isoshard.torch_bridge as xs
        >>> mesh = xs.Mesh(range(8), (2, 4), ("x", "y"))
        >>> t = xs.mark_sharding(torch.ones(8, 16, device="jax"), mesh, ("x", None))
        >>> visualize_sharding(t, header="weights")
        weights
        float32[8, 16]  P('x',)  mesh (x=2, y=4)
        2 blocks of [4, 16], each on 4 devices
              0:16
            ┌───────┐
        0:4 │  0-3  │
            ├───────┤
        4:8 │  4-7  │
            └───────┘
    """
    if header:
        print(header)
    print(visualize(dtensor, use_rich=use_rich))
