"""Subprograms: bodies of loops and calls, traced on their own, with their VJP."""

if __name__ != "isoshard.torch_bridge.engine.subprograms":
    raise ImportError(
        f"import isoshard.torch_bridge.engine.subprograms, not {__name__}: pip install -e . first"
    )
