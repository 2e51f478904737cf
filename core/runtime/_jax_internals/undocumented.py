"""Names of JAX without an underscore that its documentation does not have.

>>> import jax
>>> key_impl(jax.random.key(0))
'threefry2x32'
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from .declared import NAMES

key_impl: Callable[[Any], Any] = NAMES.bind(
    "jax.random.key_impl",
    why="names the algorithm of random keys",
    without="saving keys, and passing them to functions of torch, raises",
)

linear_call: Callable[..., Any] = NAMES.bind(
    "jax.custom_derivatives.linear_call",
    why="gives a linear function the transpose that is written for it",
    without="gathers of rows and resizing in blocks raise",
)


def class_of_spaces() -> Any:
    """The class of the memories in types; no device is used."""
    classes: list[type] = []

    def note(x: Any) -> Any:
        classes.append(type(jax.typeof(x).memory_space))
        return x

    jax.eval_shape(note, jax.ShapeDtypeStruct((), "float32"))
    return classes[0]


Space: Any = NAMES.bind(
    "jax.memory.Space",
    make=class_of_spaces,
    why="names the memories of a device in a type",
    without="nothing changes: it is the class that types name them with",
)
