"""The search for a plan."""

if __name__ != "isoshard.core.planner.search":
    raise ImportError(f"import isoshard.core.planner.search, not {__name__}: pip install -e .")
