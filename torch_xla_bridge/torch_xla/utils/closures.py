"""Step closures, and what runs them."""

from isoshard.torch_bridge.kit import AsyncClosureHandler, ClosureHandler

__all__ = ["AsyncClosureHandler", "ClosureHandler"]
