"""Scheduled programs of a device, read from a jaxpr or from HLO: kernels, their order, memory."""

if __name__ != "isoshard.planner.scheduling":
    raise ImportError(f"import isoshard.planner.scheduling, not {__name__}: pip install -e .")
