"""Functions written for global arrays, run on arrays in blocks, primitive by primitive."""

if __name__ != "isoshard.core.lifting":
    raise ImportError(f"import isoshard.core.lifting, not {__name__}: pip install -e . first")
