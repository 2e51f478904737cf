"""Domain parallelism: one sample over many devices, in shards of any size.

Users say `iso.domain`. Arrays are `jax.Array`s whose axes divide, or `UnevenArray`s.
"""

if __name__ != "isoshard.core.domain":
    raise ImportError(f"import isoshard.core.domain, not {__name__}: pip install -e . first")

from .attention import ring_attention, ulysses_attention, unzigzag, zigzag
from .conv import conv
from .fft import fft, ifft, irfft, rfft
from .halo import halo, halo_exchange
from .handlers import Shards, register_function_handler
from .in_blocks import in_blocks
from .laying import BlockLayout, lay_in_blocks, lay_out_in_blocks, without_padding
from .lifting import lift
from .packing import pack, repack, unpack
from .pad import pad, roll
from .points import (
    GraphHalo,
    Neighbors,
    Within,
    knn,
    partition_graph,
    radius_search,
    segment_sum,
)
from .pool import avg_pool, max_pool
from .resize import interpolate
from .ring import ring
from .scan import cummax, cummin, cumprod, cumsum
from .scattering import scatter_tensor
from .transposed import conv_transpose

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
