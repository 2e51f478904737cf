"""Sharding, loading and wrapping, by torch_xla's names."""

if __name__ != "isoshard.torch_xla_bridge.torch_xla.distributed":
    raise ImportError(f"import isoshard.torch_xla_bridge.torch_xla.distributed, not {__name__}")

from isoshard.torch_xla_bridge.session.lazy_submodules import submodules

__getattr__ = submodules(
    __name__,
    ("data_parallel", "fsdp", "parallel_loader", "spmd", "xla_backend", "xla_multiprocessing"),
)
