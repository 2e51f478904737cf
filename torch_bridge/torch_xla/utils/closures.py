"""Step closures, and what runs them."""

from isoshard.torch_bridge.closures import AsyncClosureHandler, ClosureHandler

__all__ = ["AsyncClosureHandler", "ClosureHandler"]
