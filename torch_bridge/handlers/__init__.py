"""Handlers for torch functions: which function has one, and how torch arrives at it."""

if __name__ != "isoshard.torch_bridge.handlers":
    raise ImportError(
        f"import isoshard.torch_bridge.handlers, not {__name__}: pip install -e . first"
    )
