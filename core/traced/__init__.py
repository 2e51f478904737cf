"""A step as the planner takes it: one traced program, with names and layouts of what it takes."""

if __name__ != "isoshard.core.traced":
    raise ImportError(f"import isoshard.core.traced, not {__name__}: pip install -e .")
