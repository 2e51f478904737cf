"""The command `isoshard plan`."""

if __name__ != "isoshard.planner.cli":
    raise ImportError(f"import isoshard.planner.cli, not {__name__}: pip install -e . first")
