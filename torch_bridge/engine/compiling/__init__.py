"""Compiling and running: from a tape to one XLA program, and its inputs and results."""

if __name__ != "isoshard.torch_bridge.engine.compiling":
    raise ImportError(
        f"import isoshard.torch_bridge.engine.compiling, not {__name__}: pip install -e . first"
    )
