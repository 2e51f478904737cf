"""A call of an operator bound to its schema, and every check of its arguments."""

if __name__ != "isoshard.torch_bridge.engine.signatures":
    raise ImportError(
        f"import isoshard.torch_bridge.engine.signatures, not {__name__}: pip install -e . first"
    )
