"""Planning ahead of time: a step's memory, traffic and time on machines that are not here."""

if __name__ != "isoshard.core.planner":
    raise ImportError(f"import isoshard.core.planner, not {__name__}: pip install -e . first")
