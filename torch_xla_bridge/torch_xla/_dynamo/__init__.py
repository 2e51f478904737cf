"""Settings of `torch.compile(.., backend="openxla")`, by torch_xla's names."""

if __name__ != "isoshard.torch_xla_bridge.torch_xla._dynamo":
    raise ImportError(f"import isoshard.torch_xla_bridge.torch_xla._dynamo, not {__name__}")

from isoshard.torch_xla_bridge.session.lazy_submodules import submodules

__getattr__ = submodules(__name__, ("config",))
