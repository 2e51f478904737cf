"""Fourier transforms of arrays that are split over devices."""

if __name__ != "isoshard.domain.fourier":
    raise ImportError(f"import isoshard.domain.fourier, not {__name__}: pip install -e . first")

from . import fourier_rules  # what functions that are lifted do with these operators

__all__ = ["fourier_rules"]
