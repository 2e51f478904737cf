"""Your own operators in torch: handlers for torch functions on the `jax` device."""

if __name__ != "isoshard.torch_bridge.handlers":
    raise ImportError(f"import isoshard.torch_bridge.handlers, not {__name__}")

from .handler_registry import Handle, register_function_handler
from .torch_handler import TorchShards

__all__ = ["Handle", "TorchShards", "register_function_handler"]
