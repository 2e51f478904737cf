"""Rules: what each primitive does with operands that lie in blocks."""

if __name__ != "isoshard.core.domain.rules":
    raise ImportError(f"import isoshard.core.domain.rules, not {__name__}")

from . import (
    calls,
    elementwise,
    fourier,
    indexing,
    loops,
    moving,
    ordering,
    products,
    reductions,
    shapes,
    spatial,
)

__all__ = [
    "calls",
    "elementwise",
    "fourier",
    "indexing",
    "loops",
    "moving",
    "ordering",
    "products",
    "reductions",
    "shapes",
    "spatial",
]
