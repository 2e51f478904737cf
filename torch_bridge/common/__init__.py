"""What every room of the bridge uses: dtypes, names, shared host memory, argument types."""

if __name__ != "isoshard.torch_bridge.common":
    raise ImportError(
        f"import isoshard.torch_bridge.common, not {__name__}: pip install -e . first"
    )
