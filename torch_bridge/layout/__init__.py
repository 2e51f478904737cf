"""What a tensor says of its layout, and its pieces."""

if __name__ != "isoshard.torch_bridge.layout":
    raise ImportError(f"import isoshard.torch_bridge.layout, not {__name__}")
