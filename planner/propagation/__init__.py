"""Depth "trace": sharding propagation, SPMD lowering, fusion and memory of a traced step."""

if __name__ != "isoshard.planner.propagation":
    raise ImportError(f"import isoshard.planner.propagation, not {__name__}: pip install -e .")
