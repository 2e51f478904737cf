"""What a tensor is before it is computed: values, views, dtypes of views, layouts as numbers."""

if __name__ != "isoshard.torch_bridge.engine.values":
    raise ImportError(
        f"import isoshard.torch_bridge.engine.values, not {__name__}: pip install -e . first"
    )
