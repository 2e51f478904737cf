"""Checkpoints of tensors on meshes: planners for `torch.distributed.checkpoint`, and a manager.

>>> import isoshard.torch_bridge.checkpoints as checkpoints
>>> checkpoints.CheckpointManager("run", save_interval=100, chkpt_on_preemption=False).all_steps()
[]
"""

if __name__ != "isoshard.torch_bridge.checkpoints":
    raise ImportError(f"import isoshard.torch_bridge.checkpoints, not {__name__}")

from isoshard.core.errors import CheckpointError

from .load_planner import SPMDLoadPlanner
from .manager import CheckpointManager
from .priming import prime_optimizer
from .save_planner import SPMDSavePlanner

__all__ = [
    "CheckpointError",
    "CheckpointManager",
    "SPMDLoadPlanner",
    "SPMDSavePlanner",
    "prime_optimizer",
]
