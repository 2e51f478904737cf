"""What planning finds, as an object that prints, shows itself and is kept as JSON."""

if __name__ != "isoshard.planner.reports":
    raise ImportError(f"import isoshard.planner.reports, not {__name__}: pip install -e .")
