"""Transfer: arrays and host memory onto devices, off them, and from one sharding to another."""

if __name__ != "isoshard.core.transfer":
    raise ImportError(f"import isoshard.core.transfer, not {__name__}: pip install -e . first")
