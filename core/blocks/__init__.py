"""Arrays in blocks of unequal sizes: their layout, how they are packed, moved and computed with."""

if __name__ != "isoshard.core.blocks":
    raise ImportError(f"import isoshard.core.blocks, not {__name__}: pip install -e . first")
