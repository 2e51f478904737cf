"""Programs as text and as files."""

if __name__ != "isoshard.torch_bridge.export":
    raise ImportError(f"import isoshard.torch_bridge.export, not {__name__}")
