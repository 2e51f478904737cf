"""`torch_xla.experimental.distributed_checkpoint.manager`."""

from isoshard.torch_bridge.kit import CheckpointManager

__all__ = ["CheckpointManager"]
