"""Execution of every operation at once, by torch_xla's names."""

from isoshard.torch_xla_bridge.session.eager_mode import context as eager_mode_context
from isoshard.torch_xla_bridge.session.eager_mode import is_used as is_eager_mode
from isoshard.torch_xla_bridge.session.eager_mode import use as eager_mode

from ..torch_xla import compile

__all__ = ["compile", "eager_mode", "eager_mode_context", "is_eager_mode"]
