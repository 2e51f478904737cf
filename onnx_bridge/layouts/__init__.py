"""Layouts: ONNX's ShardingSpecProto to and from NamedSharding, through core's `Tiles`."""

if __name__ != "isoshard.onnx_bridge.layouts":
    raise ImportError(f"import isoshard.onnx_bridge.layouts, not {__name__}")

from .shardings import from_sharding_spec
from .writing import to_sharding_spec

__all__ = ["from_sharding_spec", "to_sharding_spec"]
