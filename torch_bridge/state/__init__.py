"""The state of modules and optimizers in checkpoints of any format, saved and restored."""

if __name__ != "isoshard.torch_bridge.state":
    raise ImportError(f"import isoshard.torch_bridge.state, not {__name__}")
