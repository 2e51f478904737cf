"""Products with matrices of int8, by torch_xla's names.

Importing it defines `torch.ops.xla.quantized_matmul` as well.
"""

from isoshard.torch_bridge.kernels import xla_operators as _operators  # noqa: F401  (defines it)
from isoshard.torch_bridge.kernels.quantized import QuantizedLinear as XlaQuantizedLinear
from isoshard.torch_bridge.kernels.quantized import quantized_matmul

__all__ = ["XlaQuantizedLinear", "quantized_matmul"]
