"""Array-like values: what counts as an array, alone and inside a tree.

Where an array is expected, a number or a plain list or tuple of numbers is one, as for
`jnp.asarray`. Inside a tree only arrays are sharded; other leaves are returned unchanged: a step
number, a name, a function, and a list of numbers, which is a tree of numbers there.

>>> is_literal(2.5), is_literal([[1, 2], (3, 4)]), is_literal([np.ones(2), 1]), is_literal(["a"])
(True, True, False, False)
>>> from_literal([[1, 2], (3, 4.5)])
array([[1. , 2. ],
       [3. , 4.5]])
>>> is_array(np.ones(2)), is_array(jax.ShapeDtypeStruct((2,), "float32")), is_array(3)
(True, True, False)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from isoshard.core.errors import CopyError, no_sharing
from isoshard.core.runtime import metrics

Number = bool | int | float | complex
AnyArray = jax.Array | np.ndarray[Any, Any] | np.generic | Number
"""What is one array by itself."""
AnyTree = Mapping[Any, Any] | tuple[Any, ...] | list[Any] | None
"""A tree whose leaves may become others."""
K = TypeVar("K")
NumberT = TypeVar("NumberT", bound=Number)
ArrayT = TypeVar("ArrayT", bound=jax.Array | np.ndarray[Any, Any])
Kept = TypeVar("Kept")
"""A tensor, a module, a struct, and what else comes out as the type that went in."""

_NUMBERS = (bool, int, float, complex, np.number, np.bool_)
_ARRAYS = (np.ndarray, np.generic, jax.Array, jax.ShapeDtypeStruct)


def is_array(x: Any) -> bool:
    """Whether `x` is an array of NumPy (also of rank 0) or JAX, or the shape and dtype of one."""
    return isinstance(x, _ARRAYS)


def is_literal(x: Any) -> bool:
    """Whether `x` is a Python number, or a list or tuple, also nested, of numbers only.

    NamedTuples and other subclasses are trees, and so are lists without a number.
    """
    if type(x) not in (list, tuple):
        return isinstance(x, _NUMBERS) and not isinstance(x, np.generic)
    has_number = False
    for item in x:
        if not isinstance(item, _NUMBERS) and not is_literal(item):
            return False
        has_number = True
    return has_number


def from_literal(x: Any, copy: bool | None = None, name: str = "array") -> np.ndarray | jax.Array:
    """The array of a number or a list of numbers.

    Args:
        x: a value for which `is_literal` is true.
        copy: as for `shard`; there is no memory to share.
        name: of the array, for messages.

    Returns:
        Of a number what `jnp.asarray` gives, weakly typed; of a list a NumPy array with 64-bit
        integers and floats, to be narrowed as any other.

    Raises:
        CopyError: copy is False, or an integer fits no dtype.
        TypeError: the rows of a list differ in length.

    Example:
        >>> from_literal([[1, 2], [3]], name="rows")
        Traceback (most recent call last):
            ...
        TypeError: rows: a list of numbers whose rows differ in length is no array. Pad them, or pass a tree of arrays.
    """  # noqa: E501
    if copy is False:
        raise no_sharing(name, f"a {type(x).__name__} of Python has no memory of an array")
    try:
        return _from_list(x) if isinstance(x, list | tuple) else _from_number(x)
    except OverflowError:
        bits = 64 if isinstance(x, list | tuple) or _has_64_bits() else 32
        raise CopyError(
            f"{name}: an integer does not fit {bits} bits. Make it a float"
            + ("." if bits == 64 else ", or call jax.config.update('jax_enable_x64', True) first.")
        ) from None
    except ValueError:
        raise TypeError(
            f"{name}: a list of numbers whose rows differ in length is no array. Pad them, or pass "
            "a tree of arrays."
        ) from None


def hidden_array(x: Any) -> str:
    """The reason why a leaf may not be ignored: it is or has an array that JAX does not see.

    Example:
        >>> class Layer:
        ...     def __init__(self):
        ...         self.weight = np.ones(3)
        >>> hidden_array(Layer())
        'is a Layer, no pytree, and has arrays (weight)'
        >>> hidden_array(3), hidden_array(len), hidden_array("name")
        ('', '', '')
    """
    kind = type(x).__name__
    if isinstance(x, type) or callable(x):
        return ""
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return f"is a {kind}, with a shape and a dtype"
    arrays = [key for key, value in getattr(x, "__dict__", {}).items() if is_array(value)]
    return f"is a {kind}, no pytree, and has arrays ({', '.join(arrays)})" if arrays else ""


def _from_number(x: Any) -> jax.Array:
    array = jnp.asarray(x)
    if not _has_64_bits() and not isinstance(x, bool):
        metrics.count("narrowed")
        metrics.count("narrowed_bytes", array.nbytes)
    return array


def _has_64_bits() -> bool:
    return jax.dtypes.canonicalize_dtype(np.int64) == np.int64


def _from_list(x: Any) -> np.ndarray:
    with jax.enable_x64(True):  # the dtype before narrowing
        dtype = jnp.result_type(*{type(item): item for item in jax.tree.leaves(x)}.values())
    return np.array(x, dtype)
