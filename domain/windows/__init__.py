"""Operators that read neighbours along split axes: convolutions, pooling, resizing, halos."""

if __name__ != "isoshard.domain.windows":
    raise ImportError(f"import isoshard.domain.windows, not {__name__}: pip install -e . first")

from . import window_rules  # what functions that are lifted do with these operators

__all__ = ["window_rules"]
