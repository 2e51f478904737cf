"""The search for a plan."""

if __name__ != "isoshard.planner.plan_search":
    raise ImportError(f"import isoshard.planner.plan_search, not {__name__}: pip install -e .")
