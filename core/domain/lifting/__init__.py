"""Functions written for whole arrays, run on arrays in blocks, primitive by primitive."""

if __name__ != "isoshard.core.domain.lifting":
    raise ImportError(
        f"import isoshard.core.domain.lifting, not {__name__}: pip install -e . first"
    )
