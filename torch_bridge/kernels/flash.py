"""Flash attention by torch_xla's name; what computes it is plain JAX, on every kind of device.

>>> import torch, isoshard.torch_bridge
>>> q = torch.ones(1, 2, 4, 8, device="jax", requires_grad=True)
>>> flash_attention(q, q, q, causal=True).shape
torch.Size([1, 2, 4, 8])
"""

from __future__ import annotations

from typing import Any

import torch

from isoshard.core.layout.spec import named_sharding
from isoshard.torch_bridge.interop.calling_jax import TorchFunction
from isoshard.torch_bridge.spmd import get_global_mesh

from . import jax_kernels

_FLASH = TorchFunction(jax_kernels.flash_attention, "flash_attention")
_BY_NAME = ("ab", "partition_spec", "mesh")


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    q_segment_ids: torch.Tensor | None = None,
    kv_segment_ids: torch.Tensor | None = None,
    sm_scale: float = 1.0,
    *,
    ab: torch.Tensor | None = None,
    partition_spec: Any = None,
    mesh: Any = None,
) -> torch.Tensor:
    """Attention, `softmax((q k^T + ab) * sm_scale) v`.

    Args:
        q: (.., heads, queries, width), on the `jax` device.
        k: (.., heads, keys, width).
        v: (.., heads, keys, width).
        causal: query `i` sees keys `0..i`.
        q_segment_ids: (.., queries), integers; a query sees the keys with its number.
        kv_segment_ids: (.., keys); required with `q_segment_ids`.
        sm_scale: of the scores. 1 by default, not 1 / sqrt(width).
        ab: (.., heads, queries, keys), added to the scores before they are scaled.
        partition_spec: how q, k, v and the result are sharded; None leaves it to XLA.
        mesh: the mesh of `partition_spec`; by default the global mesh.

    Returns:
        (.., heads, queries, width), of the dtype of `q`. It has gradients.

    Raises:
        ValueError: the shapes do not fit together, or only one of the segment ids is passed.
    """
    if (q_segment_ids is None) != (kv_segment_ids is None):
        raise ValueError(
            "flash_attention needs q_segment_ids and kv_segment_ids together, and got only one"
        )
    if q.dim() < 4 or k.shape != v.shape or q.shape[:-2] != k.shape[:-2]:
        raise ValueError(
            "flash_attention takes q (.., heads, queries, width) with k and v (.., heads, keys, "
            f"width), and got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    sharding = None
    if partition_spec is not None:
        mesh = mesh or get_global_mesh()
        if mesh is None:
            raise ValueError(
                "flash_attention with a partition_spec needs a mesh; pass mesh=.., or call "
                "set_global_mesh(mesh) first"
            )
        sharding = named_sharding(partition_spec, mesh, q.dim(), shape=tuple(q.shape))
    return _FLASH(
        q,
        k,
        v,
        q_segment_ids,
        kv_segment_ids,
        ab,
        causal=bool(causal),
        scale=float(sm_scale),
        sharding=sharding,
    )


class FlashAttention:
    """`flash_attention` as torch_xla's autograd function, and what scripts set on it.

    Attributes:
        DEFAULT_BLOCK_SIZES: for a TPU kernel; does nothing here.
        DEFAULT_MASK_VALUE: the score of a masked key.
    """

    DEFAULT_MASK_VALUE = jax_kernels.MASKED
    DEFAULT_BLOCK_SIZES: dict[str, int] = {}  # noqa: RUF012 (scripts replace it)

    @staticmethod
    def apply(*args: Any) -> torch.Tensor:
        """See `flash_attention`; all arguments are positional."""
        return flash_attention(*args[:7], **dict(zip(_BY_NAME, args[7:], strict=False)))
