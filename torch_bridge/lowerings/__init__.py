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
    "arithmetic",
    "compare",
    "reduce",
    "order",
    "shape",
    "scatter_view",
    "index",
    "scatter",
    "create",
    "random",
    "matmul",
    "linalg",
    "distance",
    "activation",
    "softmax",
    "norm",
    "conv",
    "pool",
    "adaptive_pool",
    "upsample",
    "grid_sample",
    "loss",
    "embedding",
    "foreach",
)

for _family in _FAMILIES:
    importlib.import_module(f"{__name__}.{_family}")
