"""Array-like: what is taken for an array, and what stays what it is.

Where one array is wanted, a number or a plain list or tuple of numbers is one, as `jnp.asarray`
sees it. Inside a tree, arrays are laid out and all else stays: a step number, a name, a function, a
list of numbers too, which is a tree of numbers there.

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

    NamedTuples and other subclasses are trees, and so is what holds no number.
    """
    if type(x) not in (list, tuple):
        return isinstance(x, _NUMBERS) and not isinstance(x, np.generic)
    found = False
    for item in x:
        if not isinstance(item, _NUMBERS) and not is_literal(item):
            return False
        found = True
    return found


def from_literal(x: Any, copy: bool | None = None, name: str = "array") -> np.ndarray | jax.Array:
    """The array that a number or a list of numbers stands for.

    Args:
        x: what `is_literal` says yes to.
        copy: as for `shard`; it has no memory to share.
        name: of it, for messages.

    Returns:
        Of a number what `jnp.asarray` gives, which adapts to the dtypes it meets; of a list an
        array in host memory, its integers and floats of 64 bits, to be narrowed as any other.

    Raises:
        CopyError: copy is False, or an integer fits no dtype.
        TypeError: the rows of a list differ in length.

    Example:
        >>> from_literal([[1, 2], [3]], name="rows")
        Traceback (most recent call last):
            ...
        TypeError: rows: a list of numbers whose rows differ in length is no array. Pad them, or give a tree of arrays.
    """  # noqa: E501
    if copy is False:
        raise no_sharing(name, f"a {type(x).__name__} of Python has no memory of an array")
    try:
        return _from_list(x) if isinstance(x, list | tuple) else _from_number(x)
    except OverflowError:
        bits = 64 if isinstance(x, list | tuple) or _has_64_bits() else 32
        raise CopyError(
            f"{name}: holds an integer that does not fit {bits} bits. Make it a float"
            + ("." if bits == 64 else ", or call jax.config.update('jax_enable_x64', True) first.")
        ) from None
    except ValueError:
        raise TypeError(
            f"{name}: a list of numbers whose rows differ in length is no array. Pad them, or give "
            "a tree of arrays."
        ) from None


def hidden_array(x: Any) -> str:
    """Why a leaf that is no array may not be passed over, if it is or has one in disguise.

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
    made = jnp.asarray(x)
    if not _has_64_bits() and not isinstance(x, bool):
        metrics.count("narrowed")
        metrics.count("narrowed_bytes", made.nbytes)
    return made


def _has_64_bits() -> bool:
    return jax.dtypes.canonicalize_dtype(np.int64) == np.int64


def _from_list(x: Any) -> np.ndarray:
    with jax.enable_x64(True):  # the dtype before it is narrowed
        dtype = jnp.result_type(*{type(item): item for item in jax.tree.leaves(x)}.values())
    return np.array(x, dtype)
