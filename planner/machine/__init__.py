"""Described hardware, which need not be attached: chips, their links, and meshes over them."""

if __name__ != "isoshard.planner.machine":
    raise ImportError(f"import isoshard.planner.machine, not {__name__}: pip install -e .")
