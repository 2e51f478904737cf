"""A step as one traced program, with the names and shardings of its inputs, for the planner."""

if __name__ != "isoshard.core.traced":
    raise ImportError(f"import isoshard.core.traced, not {__name__}: pip install -e .")
