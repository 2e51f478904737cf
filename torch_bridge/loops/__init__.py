"""Layers and steps as one loop of the program."""

if __name__ != "isoshard.torch_bridge.loops":
    raise ImportError(f"import isoshard.torch_bridge.loops, not {__name__}")
