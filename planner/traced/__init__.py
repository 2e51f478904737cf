"""Traced steps of any framework, and their forms for abstract meshes and for loops."""

if __name__ != "isoshard.planner.traced":
    raise ImportError(f"import isoshard.planner.traced, not {__name__}: pip install -e . first")
