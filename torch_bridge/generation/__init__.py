"""`generate` of `transformers` on the `jax` device: captured programs over a static cache."""

import importlib

from isoshard.torch_bridge.common.after_import import after_import

if __name__ != "isoshard.torch_bridge.generation":
    raise ImportError(f"import isoshard.torch_bridge.generation, not {__name__}")


def register() -> None:
    """Prepare `generate` once a program imports `transformers`."""
    after_import("transformers.generation.utils", _install)


def _install() -> None:
    importlib.import_module(f"{__name__}.hook")  # it wraps `generate`
    importlib.import_module(f"{__name__}.shared_programs")  # of compiled steps
