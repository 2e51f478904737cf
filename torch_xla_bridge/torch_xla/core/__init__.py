"""Devices, steps and collectives, by torch_xla's names."""

if __name__ != "isoshard.torch_xla_bridge.torch_xla.core":
    raise ImportError(f"import isoshard.torch_xla_bridge.torch_xla.core, not {__name__}")

from isoshard.torch_xla_bridge.session.lazy_submodules import submodules

__getattr__ = submodules(__name__, ("xla_builder", "xla_env_vars", "xla_model", "xla_op_registry"))
