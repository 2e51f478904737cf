"""Which axes of a program's values lie alike, and how layouts spread along them."""

if __name__ != "isoshard.planner.propagation":
    raise ImportError(f"import isoshard.planner.propagation, not {__name__}: pip install -e .")
