"""One scheduled program of a device, whatever it was read from: kernels, their order, memory."""

if __name__ != "isoshard.planner.scheduling":
    raise ImportError(f"import isoshard.planner.scheduling, not {__name__}: pip install -e .")
