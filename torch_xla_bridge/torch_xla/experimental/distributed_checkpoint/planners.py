"""`torch_xla.experimental.distributed_checkpoint.planners`."""

from isoshard.torch_bridge.kit import SPMDLoadPlanner, SPMDSavePlanner

__all__ = ["SPMDLoadPlanner", "SPMDSavePlanner"]
