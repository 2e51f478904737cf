"""Equal parts of a traced program, rewritten as one loop."""

if __name__ != "isoshard.core.repeats":
    raise ImportError(f"import isoshard.core.repeats, not {__name__}: pip install -e .")
