"""Checkpoints as folders: committed whole or not at all, known by step, checked when read.

What stands here knows files and checksums and no framework: `isoshard.jax_bridge.checkpoint` and
`isoshard.torch_bridge.checkpoints` both write through it. `source` says what a checkpoint of any
format offers to `iso.restore`, and what modules and optimizers offer to `iso.save`.
"""

if __name__ != "isoshard.core.checkpoints":
    raise ImportError(f"import isoshard.core.checkpoints, not {__name__}")
