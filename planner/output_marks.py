"""Marks of module outputs and of their gradients in a traced program, for planning.

Both are marked by the primitive `name`, which computes nothing. The output of several nested
modules has one gradient, with one mark that has all their names.

>>> with marked_gradients():
...     def loss(x):
...         inner = with_marks(x * 2.0, "layers.0.down")
...         return with_marks(inner, "layers.0").sum()
...     program = jax.make_jaxpr(jax.grad(loss))(jax.numpy.ones(3))
>>> [eqn.params["name"] for eqn in program.eqns if eqn.primitive.name == "name"]
['module:layers.0.down', 'module:layers.0', 'gradient:layers.0.down,layers.0']
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from isoshard.core.kit import GRADIENT, MODULE, Zero, new_primitive


@dataclasses.dataclass(eq=False)
class _Owners:
    """The modules whose output a value is, the innermost first; complete when the trace ends."""

    names: list[str]


_outputs: contextvars.ContextVar[dict[int, tuple[Any, _Owners]]] = contextvars.ContextVar("outputs")
"""The marked values of a trace by id, with the modules whose output they are."""


@contextlib.contextmanager
def marked_gradients() -> Iterator[None]:
    """Context of one trace in which `with_marks` is called."""
    token = _outputs.set({})
    try:
        yield
    finally:
        _outputs.reset(token)


def with_output_mark(x: Any, name: str) -> Any:
    """A value, marked as the output of a module.

    Args:
        x: of any type; only arrays are marked.
        name: of the module.
    """
    return checkpoint_name(x, MODULE + name) if isinstance(x, jax.Array) else x


def with_marks(x: Any, name: str) -> Any:
    """As `with_output_mark`, with a mark of the gradient, where one is taken."""
    if not isinstance(x, jax.Array) or not jnp.issubdtype(x.dtype, jnp.inexact):
        return with_output_mark(x, name)
    outputs = _outputs.get()
    before, owners = outputs.get(id(x), (None, None))
    if owners is not None and before is x:
        owners.names.append(name)
        result = with_output_mark(x, name)
    else:
        owners = _Owners([name])
        result = _marked_p.bind(x, name=MODULE + name, owners=owners)
    outputs[id(result)] = result, owners
    return result


def _derivative(primals: Any, tangents: Any, *, name: str, owners: _Owners) -> tuple[Any, Any]:
    (x,), (tangent,) = primals, tangents
    if not isinstance(tangent, Zero):
        tangent = _marked_p.bind(tangent, name=name, owners=owners)
    return checkpoint_name(x, name), tangent


def _transposed(cotangent: Any, x: Any, *, name: str, owners: _Owners) -> list[Any]:
    return [checkpoint_name(cotangent, GRADIENT + ",".join(owners.names))]


_marked_p = new_primitive(
    "name", lambda x, **_: x, lambda x, **_: x, transpose=_transposed, jvp=_derivative
)
"""JAX's `name` with a marked gradient. It remains in a program without a gradient, so it has the
name of JAX's primitive."""
