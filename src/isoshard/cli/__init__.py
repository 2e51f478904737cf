"""The `isoshard` command: `isoshard doctor`, `demo`, `plan`, `onnx` and `run-torch-xla`."""

if __name__ != "isoshard.cli":
    raise ImportError(f"import isoshard.cli, not {__name__}: pip install -e . first")

from .dispatch import main

__all__ = ["main"]
