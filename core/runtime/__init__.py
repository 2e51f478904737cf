"""What runs and how it is counted: metrics, compilation, keys, and JAX's private names."""

if __name__ != "isoshard.core.runtime":
    raise ImportError(f"import isoshard.core.runtime, not {__name__}: pip install -e . first")
