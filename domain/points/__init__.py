"""Clouds of points and graphs over devices: neighbours, and sums over edges."""

if __name__ != "isoshard.domain.points":
    raise ImportError(f"import isoshard.domain.points, not {__name__}: pip install -e . first")

from .graph import GraphHalo, partition_graph, segment_sum
from .neighbors import Neighbors, Within, knn, radius_search

__all__ = ["GraphHalo", "Neighbors", "Within"]
__all__ += ["knn", "partition_graph", "radius_search", "segment_sum"]
