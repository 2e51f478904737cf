"""The helpers of torch_xla's own tests that scripts import."""

if __name__ != "isoshard.torch_xla_bridge.torch_xla.test":
    raise ImportError(f"import isoshard.torch_xla_bridge.torch_xla.test, not {__name__}")

from isoshard.torch_xla_bridge.session.lazy_submodules import submodules

__getattr__ = submodules(__name__, ("test_utils",))
