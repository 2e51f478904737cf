"""What planning finds, as an object that prints, shows itself and is kept as JSON."""

if __name__ != "isoshard.core.planner.reports":
    raise ImportError(f"import isoshard.core.planner.reports, not {__name__}: pip install -e .")
