"""Steps of torch traced without data, as `isoshard.planner` takes them."""

if __name__ != "isoshard.planner.torch_steps":
    raise ImportError(f"import isoshard.planner.torch_steps, not {__name__}: pip install -e .")
