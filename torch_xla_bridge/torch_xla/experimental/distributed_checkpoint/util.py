"""`torch_xla.experimental.distributed_checkpoint.util`."""

from isoshard.torch_bridge.kit import prime_optimizer

__all__ = ["prime_optimizer"]
