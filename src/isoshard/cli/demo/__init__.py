"""The demo: train a transformer on a mesh from PyTorch, go on with its buffers in JAX.

`isoshard demo` runs it; `main` is the command. The files in reading order: `data` (what it learns
from), `model` (the torch model and the one `Plan`), `training` (a plain torch loop), `crossing`
and `flax_model` (the same buffers in JAX), `report` (what is printed and saved), `command`.
"""

if __name__ != "isoshard.cli.demo":
    raise ImportError(f"import isoshard.cli.demo, not {__name__}: pip install -e . first")

from .command import main

__all__ = ["main"]
