"""aten operators in JAX, one file per family; importing this package fills the table."""

if __name__ != "isoshard.torch_bridge.lowerings":
    raise ImportError(
        f"import isoshard.torch_bridge.lowerings, not {__name__}: pip install -e . first"
    )

import importlib

from .registry import Lowering, find, lower, names

__all__ = ["Lowering", "find", "lower", "names"]

_FAMILIES = (
    "elementwise",
    "zeta",
    "bessel",
    "polynomial",
    "arithmetic",
    "reduce",
    "order",
    "histogram",
    "segment",
    "shape",
    "scatter_view",
    "index",
    "scatter",
    "create",
    "random_numbers",
    "dirichlet",
    "matmul",
    "quantization",
    "grouped",
    "scaled_products",
    "linalg",
    "spectral",
    "ldl",
    "fft",
    "distance",
    "activation",
    "softmax",
    "norm",
    "batch_norm",
    "transformer_layers",
    "sdpa",
    "conv",
    "unfold",
    "pool",
    "adaptive_pool",
    "fractional_pool",
    "upsample",
    "antialias",
    "grid_sample",
    "loss",
    "ctc",
    "linear_cross_entropy",
    "embedding",
    "foreach",
    "fused",
)

for _family in _FAMILIES:
    importlib.import_module(f"{__name__}.{_family}")
