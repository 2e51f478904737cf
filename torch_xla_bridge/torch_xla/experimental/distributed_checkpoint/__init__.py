"""Planners and the CheckpointManager, by torch_xla's names."""

if __name__ != "isoshard.torch_xla_bridge.torch_xla.experimental.distributed_checkpoint":
    raise ImportError(
        "import isoshard.torch_xla_bridge.torch_xla.experimental.distributed_checkpoint, "
        f"not {__name__}"
    )

from isoshard.torch_bridge.kit import (
    CheckpointManager,
    SPMDLoadPlanner,
    SPMDSavePlanner,
    prime_optimizer,
)

__all__ = ["CheckpointManager", "SPMDLoadPlanner", "SPMDSavePlanner", "prime_optimizer"]
