"""torch_xla's API: its names, session, loaders and drop-in, and the real torch_xla 2.9."""

if __name__ != "isoshard.torch_xla_bridge":
    raise ImportError(f"import isoshard.torch_xla_bridge, not {__name__}: pip install -e . first")
