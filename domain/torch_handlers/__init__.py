"""Your own operators in torch: handlers for torch functions on the `jax` device."""

if __name__ != "isoshard.domain.torch_handlers":
    raise ImportError(f"import isoshard.domain.torch_handlers, not {__name__}")

from isoshard.torch_bridge.kit import Handle, register_function_handler

from .torch_handler import TorchShards

__all__ = ["Handle", "TorchShards", "register_function_handler"]
