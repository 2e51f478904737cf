"""Your own operators: a handler defines what a function does on shards."""

if __name__ != "isoshard.domain.handlers":
    raise ImportError(f"import isoshard.domain.handlers, not {__name__}")

from .handler_shards import Shards
from .results import ResultLayout
from .routing import Routed, register_function_handler

__all__ = ["ResultLayout", "Routed", "Shards", "register_function_handler"]
