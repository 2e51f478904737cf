"""JAX functions on tensors, by torch_xla's name.

>>> import jax.numpy as jnp
>>> import torch, isoshard.torch_bridge
>>> def shifted(a, b):
...     return a + jnp.sin(b)
>>> call_jax(shifted, (torch.ones(2, device="jax"), torch.zeros(2, device="jax")))
tensor([1., 1.], device='jax:0')

torch_xla's builder of XLA operations (`Op`, `create_builder`, ..) is not here: write JAX instead.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from isoshard.torch_bridge.crossings.calling_jax import TorchFunction, torch_function
from isoshard.torch_bridge.crossings.same_function import identity

__all__ = ["call_jax"]

_KEPT = 1024
_KNOWN: dict[Hashable, TorchFunction] = {}


def call_jax(
    jax_func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    name: str | None = None,
    override_hash: Hashable | None = None,
) -> Any:
    """Call a JAX function on tensors, as a part of the program that is being recorded.

    It is traced once for every combination of shapes, dtypes and other arguments, also where the
    function is defined anew for every call. Unlike torch_xla's, the call has gradients.

    Args:
        jax_func: pure, and traceable by `jax.jit`.
        args: its positional arguments, in which tensors on the `jax` device stand for arrays.
        kwargs: its keyword arguments, likewise.
        name: for error messages and reports; the function's own name if not given.
        override_hash: what the function is remembered by, instead of what it is: for functions that
            are made anew each time and hold things that cannot be compared.

    Returns:
        The function's result, with tensors for arrays.

    Raises:
        TypeError: a tensor is on another device, or `jax_func` cannot be hashed and has no
            `override_hash`.
    """
    if not isinstance(args, tuple | list):
        raise TypeError(
            f"call_jax takes the positional arguments as one tuple, not {type(args).__name__}: "
            "call_jax(f, (x,))"
        )
    try:
        key = identity(jax_func) if override_hash is None else ("hash", override_hash)
        found = _KNOWN.pop((key, name), None)
    except TypeError as error:
        raise TypeError(
            f"call_jax remembers a function by its hash, and {jax_func!r} has none ({error}); pass "
            "override_hash=.."
        ) from None
    if found is None:
        found = torch_function(jax_func, name=name)
    _KNOWN[key, name] = found  # last again: the first is the one not used for longest
    if len(_KNOWN) > _KEPT:
        del _KNOWN[next(iter(_KNOWN))]
    return found(*args, **(kwargs or {}))
