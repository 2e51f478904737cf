"""Optimizers whose steps are skipped on the device, by torch_xla's names."""

if __name__ != "isoshard.torch_xla_bridge.torch_xla.amp.syncfree":
    raise ImportError(f"import isoshard.torch_xla_bridge.torch_xla.amp.syncfree, not {__name__}")

from isoshard.torch_xla_bridge.session.syncfree import SGD, Adam, AdamW

__all__ = ["SGD", "Adam", "AdamW"]
