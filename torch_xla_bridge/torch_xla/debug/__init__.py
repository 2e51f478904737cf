"""Counters and profiles, by torch_xla's names."""

if __name__ != "isoshard.torch_xla_bridge.torch_xla.debug":
    raise ImportError(f"import isoshard.torch_xla_bridge.torch_xla.debug, not {__name__}")

from isoshard.torch_xla_bridge.session.lazy_submodules import submodules

__getattr__ = submodules(__name__, ("metrics", "model_comparator", "profiler"))
