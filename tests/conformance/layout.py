"""How the samples of the sharded column lie over eight devices.

The mesh has three axes of two devices. A tensor's first axis that eight divides is split over all
of them; if it has none, the first axis that four divides over two of them; then two, over one.

>>> spec_of(torch.ones(3, 16, 8)), spec_of(torch.ones(6, 12)), spec_of(torch.ones(5, 3))
(P(None, ('a', 'b', 'c')), P(None, ('a', 'b')), None)
"""

from __future__ import annotations

import functools

import jax
import torch
from jax.sharding import PartitionSpec as P

import isoshard as iso

from .samples import DEVICE

_OVER = {8: ("a", "b", "c"), 4: ("a", "b"), 2: "a"}


@functools.cache
def mesh() -> jax.sharding.Mesh:
    """Eight devices as 2 x 2 x 2."""
    return iso.make_mesh((2, 2, 2), ("a", "b", "c"))


def spec_of(tensor: torch.Tensor) -> P | None:
    """The layout of a tensor, or None if no axis can be divided."""
    for pieces, names in _OVER.items():
        for axis, extent in enumerate(tensor.shape):
            if extent and extent % pieces == 0:
                return P(*[None] * axis, names)
    return None


def spread(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor on the `jax` device, laid out over the mesh; replicated if it has no spec."""
    spec = spec_of(tensor)
    return tensor.to(DEVICE) if spec is None else iso.shard(tensor.to(DEVICE), mesh(), spec)
