"""Fused operations: attention, and grouped products."""

if __name__ != "isoshard.torch_bridge.kernels":
    raise ImportError(f"import isoshard.torch_bridge.kernels, not {__name__}")
