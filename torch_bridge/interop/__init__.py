"""Functions of one framework called from the other: conversions, VJPs, layouts."""

if __name__ != "isoshard.torch_bridge.interop":
    raise ImportError(f"import isoshard.torch_bridge.interop, not {__name__}")
