"""Odds and ends, by torch_xla's names."""

if __name__ != "isoshard.torch_xla_bridge.torch_xla.utils":
    raise ImportError(f"import isoshard.torch_xla_bridge.torch_xla.utils, not {__name__}")

from isoshard.torch_xla_bridge.session.lazy_submodules import submodules

__getattr__ = submodules(__name__, ("checkpoint", "closures", "dlpack", "serialization", "utils"))
