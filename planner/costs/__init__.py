"""The cost of a step: seconds from flops, bytes and links."""

if __name__ != "isoshard.planner.costs":
    raise ImportError(f"import isoshard.planner.costs, not {__name__}: pip install -e .")
