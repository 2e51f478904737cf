"""Batches for a mesh: `isoshard.data.loader(iterable, mesh, spec)`.

>>> import numpy as np
>>> import isoshard as iso
>>> mesh = iso.make_mesh((8,), ("data",))
>>> batches = iso.data.loader([np.ones((16, 4), np.float32)], mesh, iso.P("data"))
>>> [batch.sharding.spec for batch in batches]
[P('data',)]
"""

from isoshard.core.data import Batches, BatchOrder, Loader, loader

__all__ = ["BatchOrder", "Batches", "Loader", "loader"]


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
