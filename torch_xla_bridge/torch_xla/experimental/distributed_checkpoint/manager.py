"""`torch_xla.experimental.distributed_checkpoint.manager`."""

from isoshard.torch_bridge.checkpoints.manager import CheckpointManager

__all__ = ["CheckpointManager"]
