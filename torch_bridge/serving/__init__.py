"""Continuous batching: many requests in the slots of one cache, decoded together.

`Engine` serves models of `transformers`, on one device or a mesh; `SlotCache` is its key/value
cache, for loops of your own. `examples/serving` puts an HTTP server in front of it.
"""

if __name__ != "isoshard.torch_bridge.serving":
    raise ImportError(f"import isoshard.torch_bridge.serving, not {__name__}")

from .batching import Engine
from .requests import QueueFullError, Request, SamplingParams
from .slot_cache import SlotCache

__all__ = ["Engine", "QueueFullError", "Request", "SamplingParams", "SlotCache"]


def __dir__() -> list[str]:
    """The public names."""
    return __all__
