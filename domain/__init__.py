"""Domain parallelism: one sample over many devices, in shards of any size.

Users say `iso.domain`. Arrays are `jax.Array`s whose axes divide, or `UnevenArray`s.

>>> import jax.numpy as jnp
>>> from isoshard.core.layout.mesh import make_mesh
>>> rows = pack(jnp.arange(6.0), make_mesh((4,), ("x",)), ("x",), (1, 2, 0, 3))
>>> cumsum(rows, 0)
UnevenArray(float32[6] in float32[12], axis 0 in blocks of 3: 1, 2, 0, 3 valid; P('x',))
"""

if __name__ != "isoshard.domain":
    raise ImportError(f"import isoshard.domain, not {__name__}: pip install -e . first")

from isoshard.core.kit import (
    BlockLayout,
    in_blocks,
    lay_in_blocks,
    lay_out_in_blocks,
    lift,
    pack,
    repack,
    ring,
    scatter_tensor,
    unpack,
    without_padding,
)

from .attention import ring_attention, ulysses_attention, unzigzag, zigzag
from .fourier.fft import fft, ifft, irfft, rfft
from .handlers import Shards, register_function_handler
from .points import (
    GraphHalo,
    Neighbors,
    Within,
    knn,
    partition_graph,
    radius_search,
    segment_sum,
)
from .windows.conv import conv
from .windows.halo import halo, halo_exchange
from .windows.pad import pad, roll
from .windows.pool import avg_pool, max_pool
from .windows.resize import interpolate
from .windows.running_scan import cummax, cummin, cumprod, cumsum
from .windows.transposed_conv import conv_transpose

__all__ = [
    "BlockLayout",
    "GraphHalo",
    "Neighbors",
    "Shards",
    "Within",
    "avg_pool",
    "conv",
    "conv_transpose",
    "cummax",
    "cummin",
    "cumprod",
    "cumsum",
    "fft",
    "halo",
    "halo_exchange",
    "ifft",
    "in_blocks",
    "interpolate",
    "irfft",
    "knn",
    "lay_in_blocks",
    "lay_out_in_blocks",
    "lift",
    "max_pool",
    "pack",
    "pad",
    "partition_graph",
    "radius_search",
    "register_function_handler",
    "repack",
    "rfft",
    "ring",
    "ring_attention",
    "roll",
    "scatter_tensor",
    "segment_sum",
    "ulysses_attention",
    "unpack",
    "unzigzag",
    "without_padding",
    "zigzag",
]


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
