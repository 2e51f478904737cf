"""Transfer: arrays and host memory into a layout, out of it, and from one layout to another."""

if __name__ != "isoshard.core.transfer":
    raise ImportError(f"import isoshard.core.transfer, not {__name__}: pip install -e . first")
