"""DTensor placements and JAX specs, translated into each other."""

if __name__ != "isoshard.torch_bridge.placements":
    raise ImportError(
        f"import isoshard.torch_bridge.placements, not {__name__}: pip install -e . first"
    )
