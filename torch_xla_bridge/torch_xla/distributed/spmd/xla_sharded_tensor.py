"""The sharded tensor and its shards, by torch_xla's names."""

from isoshard.torch_bridge.kit import XLAShard, XLAShardedTensor

__all__ = ["XLAShard", "XLAShardedTensor"]
