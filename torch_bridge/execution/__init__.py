"""Execution of what was recorded: `sync`, `compile`, step closures."""

if __name__ != "isoshard.torch_bridge.execution":
    raise ImportError(
        f"import isoshard.torch_bridge.execution, not {__name__}: pip install -e . first"
    )
