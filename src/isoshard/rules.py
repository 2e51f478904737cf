"""Rules of a `Plan` that decide by what a layer is, not by the axes of its array.

>>> import isoshard as iso
>>> from isoshard.rules import Linear
>>> mesh = iso.make_mesh((2, 4), ("data", "model"))
>>> plan = iso.Plan({"up.*": Linear(out="model"), "down.*": Linear(into="model")})
>>> plan.resolve({"up.weight": (64, 16), "down.weight": (16, 64)}, mesh).specs
{'up.weight': P('model',), 'down.weight': P(None, 'model')}
"""

from isoshard.core.plan import Activation, Conv, Experts, Heads, Largest, Linear

__all__ = ["Activation", "Conv", "Experts", "Heads", "Largest", "Linear"]


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
