"""`torch_xla.experimental.distributed_checkpoint.planners`."""

from isoshard.torch_bridge.checkpoints.load_planner import SPMDLoadPlanner
from isoshard.torch_bridge.checkpoints.save_planner import SPMDSavePlanner

__all__ = ["SPMDLoadPlanner", "SPMDSavePlanner"]
