"""Operators: from torch's dispatcher to entries of a recorder; writes, `out=`, host operators."""

if __name__ != "isoshard.torch_bridge.engine.operators":
    raise ImportError(
        f"import isoshard.torch_bridge.engine.operators, not {__name__}: pip install -e . first"
    )
