"""Attention over a sequence that is split over devices: a ring, or all-to-all by heads."""

if __name__ != "isoshard.domain.attention":
    raise ImportError(f"import isoshard.domain.attention, not {__name__}")

from .ring_attention import ring_attention
from .ulysses import ulysses_attention
from .zigzag import unzigzag, zigzag

__all__ = ["ring_attention", "ulysses_attention", "unzigzag", "zigzag"]
