"""Products with matrices of int8, by torch_xla's names.

Importing it defines `torch.ops.xla.quantized_matmul` as well.
"""

from isoshard.torch_bridge.kit import QuantizedLinear as XlaQuantizedLinear
from isoshard.torch_bridge.kit import quantized_matmul
from isoshard.torch_bridge.kit import xla_operators as _operators  # noqa: F401  (defines it)

__all__ = ["XlaQuantizedLinear", "quantized_matmul"]
