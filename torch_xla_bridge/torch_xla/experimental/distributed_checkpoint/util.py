"""`torch_xla.experimental.distributed_checkpoint.util`."""

from isoshard.torch_bridge.checkpoints.priming import prime_optimizer

__all__ = ["prime_optimizer"]
