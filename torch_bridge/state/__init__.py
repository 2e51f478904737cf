"""What a checkpoint of any format keeps of modules and optimizers, and how it comes back."""

if __name__ != "isoshard.torch_bridge.state":
    raise ImportError(f"import isoshard.torch_bridge.state, not {__name__}")
