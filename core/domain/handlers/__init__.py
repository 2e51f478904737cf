"""Your own operators: what a function does on shards, said by a handler."""

if __name__ != "isoshard.core.domain.handlers":
    raise ImportError(f"import isoshard.core.domain.handlers, not {__name__}")

from .results import Laid
from .routing import Routed, register_function_handler
from .shards import Shards

__all__ = ["Laid", "Routed", "Shards", "register_function_handler"]
