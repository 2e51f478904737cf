"""Data loading: batches are read in the background, sharded, and put on devices ahead of time."""

if __name__ != "isoshard.core.data":
    raise ImportError(f"import isoshard.core.data, not {__name__}: pip install -e . first")

from .batch_order import BatchOrder
from .loader import Batches, Loader, loader

__all__ = ["BatchOrder", "Batches", "Loader", "loader"]
