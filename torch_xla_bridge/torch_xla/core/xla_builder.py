"""JAX functions on tensors, by torch_xla's name.

>>> import jax.numpy as jnp
>>> import torch, isoshard.torch_bridge
>>> def shifted(a, b):
...     return a + jnp.sin(b)
>>> call_jax(shifted, (torch.ones(2, device="jax"), torch.zeros(2, device="jax")))
tensor([1., 1.], device='jax:0')

torch_xla's builder is here too: what it builds, JAX traces. A function in JAX is shorter.

>>> shape = mkshape(Type.F32, (2,))
>>> get_computation_hlo(create_computation("twice", lambda a: a + a, (shape,))).splitlines()[0]
'HloModule jit_twice, entry_computation_layout={(f32[2]{0})->f32[2]{0}}'
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from isoshard.core.kit import PROGRAMS, Bounded
from isoshard.torch_bridge.kit import TorchFunction, identity, torch_function

from ._computations import Computation, hlo
from ._op import Op, create_computation, mkleaf, mkop, mkparam
from ._operations import DTYPES
from ._shapes import Builder, Shape

__all__ = [
    "Op",
    "Shape",
    "Type",
    "call_jax",
    "create_builder",
    "create_computation",
    "get_computation_hlo",
    "mkleaf",
    "mkop",
    "mkparam",
    "mkshape",
    "tensor_shape",
]

_KNOWN: Bounded[Hashable, TorchFunction] = Bounded(PROGRAMS, "call_jax: functions")


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
        cached = _KNOWN.pop((key, name), None)
    except TypeError as error:
        raise TypeError(
            f"call_jax remembers a function by its hash, and {jax_func!r} has none ({error}); pass "
            "override_hash=.."
        ) from None
    if cached is None:
        cached = torch_function(jax_func, name=name)
    _KNOWN[key, name] = cached  # last again: the first is the one not used for longest
    return cached(*args, **(kwargs or {}))


class Type:
    """XLA's names of dtypes."""

    F32 = "f32"
    F64 = "f64"
    BF16 = "bf16"
    F16 = "f16"
    U8 = "u8"
    S8 = "s8"
    U16 = "u16"
    S16 = "s16"
    U32 = "u32"
    S32 = "s32"
    U64 = "u64"
    S64 = "s64"
    C64 = "c64"
    C128 = "c128"
    PRED = "pred"


def create_builder(name: str) -> Builder:
    """A builder, for functions that take one.

    Args:
        name: of the computation.
    """
    return Builder(name)


def mkshape(dtype: str, sizes: Sequence[int], dynamic_dimensions: Any = None) -> Shape:
    """The shape of an array.

    Args:
        dtype: XLA's name, of `Type`.
        sizes: of its axes.
        dynamic_dimensions: must be None.
    """
    return Shape.create(dtype, sizes, dynamic_dimensions)


def tensor_shape(tensor: Any, device: str = "") -> Any:
    """The shape of a tensor as a computation's argument; of several, a list.

    Args:
        tensor: a tensor, or a sequence of them.
        device: not used.
    """
    if isinstance(tensor, list | tuple):
        return [tensor_shape(element) for element in tensor]
    return Shape.create(_NAMES[tensor.dtype], tuple(tensor.shape))


_NAMES = {getattr(torch, dtype): name for name, dtype in DTYPES.items()}


def get_computation_hlo(computation: Computation) -> str:
    """A computation as HLO text, before any optimisation.

    Args:
        computation: of `create_computation` or `Op.build`, all of whose arguments are used.
    """
    return hlo(computation)
