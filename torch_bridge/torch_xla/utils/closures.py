"""Step closures, and what runs them."""

from isoshard.torch_bridge.session.closures import AsyncClosureHandler, ClosureHandler

__all__ = ["AsyncClosureHandler", "ClosureHandler"]
