"""Linen models for `Plan.resolve`: their variables as shapes, and the modules that are called.

A Linen module has neither before it is called, so it is traced with an example; nothing is
computed:

>>> import jax.numpy as jnp
>>> from flax import linen
>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.plan import Plan
>>> model = linen.Sequential([linen.Dense(16), linen.relu, linen.Dense(4)])
>>> plan = Plan({"*kernel": (None, "model")}, activations={"layers_0": ("data", "model")})
>>> described = linen_model(model, jax.random.key(0), jnp.ones((2, 8)))
>>> print(plan.resolve(described, make_mesh((2, 4), ("data", "model"))))
name                    shape    dtype    spec              bytes/device  rule
params.layers_0.bias    (16,)    float32  P()                       64 B  (small)
params.layers_0.kernel  (8, 16)  float32  P(None, 'model')         128 B  *kernel
params.layers_2.bias    (4,)     float32  P()                       16 B  (small)
params.layers_2.kernel  (16, 4)  float32  P(None, 'model')          64 B  *kernel
total 272 B on each of 8 devices, mesh (data=2, model=4)
module    value   spec               rule
layers_0  output  ('data', 'model')  layers_0
matched by no rule, so by default: params.layers_0.bias, params.layers_2.bias

The names are those that `constrain_activations` sees: a module counts if its `__call__` runs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from isoshard.core.frameworks import Framework, register
from isoshard.core.plan.model_leaves import boxed_leaves


@dataclasses.dataclass(frozen=True)
class LinenModel:
    """The variables and modules of a Linen model, for a plan; returned by `linen_model`.

    Attributes:
        variables: what `init` returns, as shapes; boxes with axis names are kept.
        modules: the names of the modules whose `__call__` runs, in this order; "" is the model.

    Example:
        >>> from flax import linen
        >>> model = linen.Sequential([linen.Dense(16), linen.Dense(4)])
        >>> linen_model(model, jax.random.key(0), jax.ShapeDtypeStruct((2, 8), "float32")).modules
        ('', 'layers_0', 'layers_1')
    """

    variables: Any
    modules: tuple[str, ...]


def linen_model(model: Any, *args: Any, **kwargs: Any) -> LinenModel:
    """Describe a Linen model to a plan; it is traced once, and nothing is computed.

    Args:
        model: the Linen module.
        *args: as for `model.init`: a key or keys, then an example of the inputs, as arrays or
            `jax.ShapeDtypeStruct`.
        **kwargs: as for `model.init`; kept as they are, not traced.

    Returns:
        What `Plan.resolve` takes.

    Raises:
        TypeError: the model is no Linen module.

    Example:
        >>> from flax import linen
        >>> model = linen_model(linen.Dense(16), jax.random.key(0), jax.numpy.ones((2, 8)))
        >>> model.variables["params"]["kernel"].shape
        (8, 16)
    """
    from flax import linen

    if not isinstance(model, linen.Module):
        raise TypeError(
            f"linen_model takes a module of Flax Linen, not a {type(model).__name__}; pass modules "
            "of NNX, Equinox and torch directly to Plan.resolve"
        )
    modules: dict[str, None] = {}

    def note(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        if context.method_name == "__call__":
            modules[".".join(context.module.path)] = None
        return call(*args, **kwargs)

    with linen.intercept_methods(note):
        variables = jax.eval_shape(lambda *args: model.init(*args, **kwargs), *args)
    return LinenModel(variables, tuple(modules))


class LinenModels(Framework):
    """Core's verbs that `Plan.resolve` needs, for described Linen models."""

    name = "linen"

    def owns(self, obj: Any) -> bool:
        """Whether it is a description."""
        return isinstance(obj, LinenModel)

    def named_arrays(self, x: Any) -> dict[str, Any]:
        """The variables by name."""
        return dict(boxed_leaves(x.variables))

    def named_modules(self, x: Any) -> list[str] | None:
        """The names of the modules."""
        return list(x.modules)


register(LinenModels())
