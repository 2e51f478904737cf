"""Steps of torch traced without data, as `isoshard.core.planner` takes them."""

if __name__ != "isoshard.torch_bridge.planning":
    raise ImportError(f"import isoshard.torch_bridge.planning, not {__name__}: pip install -e .")
