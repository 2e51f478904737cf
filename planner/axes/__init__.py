"""Which axes of a program's values lie alike, and how layouts spread along them."""

if __name__ != "isoshard.planner.axes":
    raise ImportError(f"import isoshard.planner.axes, not {__name__}: pip install -e .")
