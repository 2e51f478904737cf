"""The search for a plan."""

if __name__ != "isoshard.core.planner.plan_search":
    raise ImportError(f"import isoshard.core.planner.plan_search, not {__name__}: pip install -e .")
