"""The sharded tensor and its shards, by torch_xla's names."""

from isoshard.torch_bridge.layout.shard_snapshots import XLAShard
from isoshard.torch_bridge.tensors.tensor import XLAShardedTensor

__all__ = ["XLAShard", "XLAShardedTensor"]
