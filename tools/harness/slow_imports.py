"""What takes seconds to import, and what a process that forks has imported before."""

SLOW_IMPORTS = (
    *("numpy", "jax", "jax.numpy", "jax.experimental", "torch", "torch._dynamo", "torch.profiler"),
    "torch.distributed.checkpoint",
)
