"""Step closures, and what runs them."""

from isoshard.torch_bridge.execution.closures import AsyncClosureHandler, ClosureHandler

__all__ = ["AsyncClosureHandler", "ClosureHandler"]
