"""Paged attention, by torch_xla's names.

Arguments that tune the TPU kernels (blocks, memory) are taken and do nothing.
"""

from __future__ import annotations

import torch

from isoshard.torch_bridge.interop.calling_jax import TorchFunction

from . import jax_kernels

_PAGED = TorchFunction(jax_kernels.paged_attention, "paged_attention")
_MULTI = TorchFunction(jax_kernels.multi_queries_paged_attention, "multi_queries_paged_attention")
_RAGGED = TorchFunction(jax_kernels.ragged_paged_attention, "ragged_paged_attention")


def paged_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    lengths: torch.Tensor,
    page_indices: torch.Tensor,
    pages_per_compute_block: int = 1,
    megacore_mode: str | None = None,
    attn_logits_soft_cap: float | None = None,
) -> torch.Tensor:
    """Attention of one query per sequence to paged keys.

    Args:
        q: (batch, heads, width), scaled by the caller.
        k_pages: (key heads, pages, page size, width).
        v_pages: likewise.
        lengths: (batch,), how many keys each sequence has.
        page_indices: (batch, pages per sequence).
        pages_per_compute_block: does nothing.
        megacore_mode: does nothing.
        attn_logits_soft_cap: scores become `cap * tanh(scores / cap)`.

    Returns:
        (batch, heads, width).
    """
    return _PAGED(q, k_pages, v_pages, lengths, page_indices, soft_cap=attn_logits_soft_cap)


def multi_queries_paged_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    lengths: torch.Tensor,
    page_indices: torch.Tensor,
    effective_q_lens: torch.Tensor,
    num_kv_pages_per_compute_block: int = 1,
    num_queries_per_compute_block: int = 1,
    use_kernel: bool = True,
    attn_logits_soft_cap: float | None = None,
) -> torch.Tensor:
    """Attention of several queries per sequence to paged keys.

    Args:
        q: (batch, queries, heads, width), scaled by the caller; the first `effective_q_lens` of
            them are the last positions of their sequence.
        k_pages: (key heads, pages, page size, width).
        v_pages: likewise.
        lengths: (batch,), how many keys each sequence has.
        page_indices: (batch, pages per sequence).
        effective_q_lens: (batch,).
        num_kv_pages_per_compute_block: does nothing.
        num_queries_per_compute_block: does nothing.
        use_kernel: does nothing.
        attn_logits_soft_cap: scores become `cap * tanh(scores / cap)`.

    Returns:
        (batch, queries, heads, width).
    """
    return _MULTI(
        q,
        k_pages,
        v_pages,
        lengths,
        page_indices,
        effective_q_lens,
        soft_cap=attn_logits_soft_cap,
    )


def ragged_paged_attention(
    q: torch.Tensor,
    kv_pages: torch.Tensor,
    kv_lens: torch.Tensor,
    page_indices: torch.Tensor,
    cu_q_lens: torch.Tensor,
    num_seqs: torch.Tensor,
    *,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    mask_value: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    use_kernel: bool = True,
    num_kv_pages_per_block: int | None = None,
    num_queries_per_block: int | None = None,
    vmem_limit_bytes: int | None = None,
) -> torch.Tensor:
    """Attention of concatenated sequences of different lengths.

    Args:
        q: (tokens, heads, width).
        kv_pages: (pages, page size, 2 * key heads, width); keys and values in turn.
        kv_lens: (sequences,), how many keys each sequence has.
        page_indices: (sequences, pages per sequence).
        cu_q_lens: (sequences + 1,), where the tokens of each sequence begin.
        num_seqs: (1,), how many sequences there are.
        sm_scale: of the scores.
        sliding_window: how many of the last keys a token sees; None for all.
        soft_cap: scores become `soft_cap * tanh(scores / soft_cap)`.
        mask_value: the score of a masked key.
        k_scale: what keys are multiplied by.
        v_scale: what values are multiplied by.
        use_kernel: does nothing.
        num_kv_pages_per_block: does nothing.
        num_queries_per_block: does nothing.
        vmem_limit_bytes: does nothing.

    Returns:
        (tokens, heads, width); zero for tokens of no sequence.
    """
    return _RAGGED(
        q,
        kv_pages,
        kv_lens,
        page_indices,
        cu_q_lens,
        num_seqs,
        scale=float(sm_scale),
        window=sliding_window,
        soft_cap=soft_cap,
        mask_value=jax_kernels.MASKED if mask_value is None else mask_value,
        k_scale=k_scale,
        v_scale=v_scale,
    )
