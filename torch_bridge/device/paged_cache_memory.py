"""The memory by which `generate_batch` of transformers sizes its paged cache.

transformers reads CUDA's memory, or XPU's or MPS's, and the host's for every other device. For a
model on the `jax` device it reads that of the chip with the least free memory instead, since every
chip that computes with the cache has it. It counts scores of attention, too, which the kernels that
transformers plans for do not keep, and batches are no longer than what is left allows. Models on
other devices are served as before.
"""

from __future__ import annotations

import contextvars
import functools
import sys
from typing import Any

import torch

from ..common import naming
from ..common.after_import import after_import
from .memory import fullest_chip

_MODULE = "transformers.generation.continuous_batching.cache"
_NAMES = ("get_device_and_memory_breakdown", "PagedAttentionCache", "PagedAttentionMemoryHandler")
_LONGEST_BATCH = 8192
"""Tokens of a batch that transformers takes by default."""

_SHARE_OF_SCORES = 0.05
"""The part of free memory that scores of a batch with itself may take; the cache has the rest."""

_heads: contextvars.ContextVar[int] = contextvars.ContextVar("heads of a paged cache", default=0)


def register() -> None:
    """Act once transformers' paged cache is imported."""
    after_import(_MODULE, _install)


def _install() -> None:
    module: Any = sys.modules[_MODULE]
    names = (
        "get_device_and_memory_breakdown",
        "PagedAttentionCache",
        "PagedAttentionMemoryHandler",
    )
    if not all(hasattr(module, name) for name in names):
        return  # a version that sizes its cache in another way
    breakdown, cache, handler = (getattr(module, name) for name in _NAMES)
    build, mask_bytes = cache.__init__, handler.attention_mask_bytes

    def memory_of_device() -> tuple[torch.device, int, int, int]:
        if not _heads.get():
            return breakdown()
        used, total = fullest_chip()
        return naming.current(), total, used, used

    @functools.wraps(mask_bytes)
    def bytes_of_masks_and_scores(self: Any, *sizes: Any) -> int:
        return mask_bytes(self, *sizes) * (1 + _heads.get())  # scores have the extents of masks

    @functools.wraps(build)
    def build_for_device(
        self: Any, config: Any, continuous_batching_config: Any, device: Any, *args: Any, **kw: Any
    ) -> None:
        if torch.device(device).type not in naming.OURS:
            return build(self, config, continuous_batching_config, device, *args, **kw)
        token = _heads.set(config.num_attention_heads)
        try:
            if continuous_batching_config.max_batch_tokens is None:
                continuous_batching_config.max_batch_tokens = _batch_tokens(config)
            build(self, config, continuous_batching_config, device, *args, **kw)
        finally:
            _heads.reset(token)

    module.get_device_and_memory_breakdown = memory_of_device
    handler.attention_mask_bytes = bytes_of_masks_and_scores
    cache.__init__ = build_for_device


def _batch_tokens(config: Any) -> int:
    """The largest power of two whose scores, in float32, have their share of free memory."""
    used, total = fullest_chip()
    limit = _SHARE_OF_SCORES * (total - used) / (4 * config.num_attention_heads)
    tokens = _LONGEST_BATCH
    while tokens > 1 and tokens * tokens > limit:
        tokens //= 2
    return tokens
