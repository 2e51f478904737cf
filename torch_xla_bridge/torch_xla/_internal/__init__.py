"""The internals of torch_xla that scripts import."""

if __name__ != "isoshard.torch_xla_bridge.torch_xla._internal":
    raise ImportError(f"import isoshard.torch_xla_bridge.torch_xla._internal, not {__name__}")

from isoshard.torch_xla_bridge.session.lazy_submodules import submodules

__getattr__ = submodules(__name__, ("jax_workarounds", "tpu"))
