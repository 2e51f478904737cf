"""Machines described, not present: chips, how they are wired, and meshes over them."""

if __name__ != "isoshard.core.planner.machine":
    raise ImportError(f"import isoshard.core.planner.machine, not {__name__}: pip install -e .")
