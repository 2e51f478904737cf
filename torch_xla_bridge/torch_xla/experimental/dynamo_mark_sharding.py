"""`torch.ops.xla.dynamo_mark_sharding`: a mark in a function that `torch.compile` traces.

    torch.ops.xla.dynamo_mark_sharding(t, [0, 1, 2, 3], [2, 2], "('x', 'y')", "('x', None)")

Importing this module, or `torch_xla.distributed.spmd` in a script of the drop-in, defines it.
"""

from isoshard.torch_bridge.kit import xla_operators as _operators  # noqa: F401  (defines it)
