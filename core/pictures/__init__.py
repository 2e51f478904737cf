"""Pictures of layouts: which device holds which shard."""

if __name__ != "isoshard.core.pictures":
    raise ImportError(f"import isoshard.core.pictures, not {__name__}: pip install -e . first")
