"""The other names of torch_xla's FSDP package: checkpointing and wrap policies."""

if __name__ != "isoshard.torch_xla_bridge.torch_xla.distributed.fsdp":
    raise ImportError(
        f"import isoshard.torch_xla_bridge.torch_xla.distributed.fsdp, not "
        f"{__name__}: pip install -e . first"
    )

from .state_dict_utils import (
    consolidate_sharded_model_checkpoints,
    consolidate_sharded_state_dicts,
)
from .utils import checkpoint_module
from .xla_fully_sharded_data_parallel import XlaFullyShardedDataParallel

__all__ = [
    "XlaFullyShardedDataParallel",
    "checkpoint_module",
    "consolidate_sharded_model_checkpoints",
    "consolidate_sharded_state_dicts",
]
