"""Parameters and buffers of modules by name, sharded all or not at all."""

if __name__ != "isoshard.torch_bridge.modules":
    raise ImportError(
        f"import isoshard.torch_bridge.modules, not {__name__}: pip install -e . first"
    )
