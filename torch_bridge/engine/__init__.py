"""The engine: torch ops recorded on a tape, compiled as one XLA program, run on the mesh."""

if __name__ != "isoshard.torch_bridge.engine":
    raise ImportError(
        f"import isoshard.torch_bridge.engine, not {__name__}: pip install -e . first"
    )
