"""Programs as text and as files."""

if __name__ != "isoshard.torch_xla_bridge.export":
    raise ImportError(f"import isoshard.torch_xla_bridge.export, not {__name__}")
