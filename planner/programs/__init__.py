"""Programs compiled in processes of their own for machines that are not here, and read."""

if __name__ != "isoshard.planner.programs":
    raise ImportError(f"import isoshard.planner.programs, not {__name__}: pip install -e .")
