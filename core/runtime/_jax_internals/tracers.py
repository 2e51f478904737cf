"""The class of the values that JAX traces functions with.

>>> import jax
>>> jax.make_jaxpr(lambda x: [print(isinstance(x, Tracer)), x][1])(1.0).jaxpr.eqns
True
[]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax

from .declared import NAMES


def common_class() -> Any:
    """The first class that the values in a jit and in a vmap have in common.

    No device is used: nothing is computed.
    """
    classes: list[tuple[type, ...]] = []

    def note(x: Any) -> Any:
        classes.append(type(x).__mro__)
        return x

    def traced(x: Any) -> Any:
        return jax.vmap(note)(note(x))

    jax.eval_shape(traced, jax.ShapeDtypeStruct((1,), "float32"))
    jitted, mapped = classes
    return next(kind for kind in jitted if kind in mapped)


if TYPE_CHECKING:
    from jax.core import Tracer
else:
    Tracer = NAMES.bind(
        "jax.core.Tracer",
        make=common_class,
        why="is the class of the values that JAX traces functions with",
        without="nothing changes: it is the class that the values in a jit and a vmap have in "
        "common",
    )
