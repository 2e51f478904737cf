"""The table from aten operators to pure JAX functions.

A lowering receives what the aten schema lists, in that order and under those names, with
`jax.Array` in place of tensors, JAX dtypes in place of torch dtypes, and without the arguments that
only steer torch's memory (`device`, `layout`, `pin_memory`, `memory_format`). It returns an array,
or a tuple of arrays for an operator with several results. The engine casts the result to the dtype
torch promises, so a lowering need only be right in value and shape.

>>> @lower("doc::softsign")
... def softsign(x):
...     return x / (1 + abs(x))
>>> import torch
>>> "doc::softsign" in names(), find(torch.ops.aten.relu.default).name
(True, 'aten::relu')

Operators that torch releases rename or drop are looked up by name, so an entry for an absent one
is harmless. In-place and `out=` variants need no entry: the engine calls the functional one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from isoshard.torch_bridge._torch_internals import OpOverload

Promotion = Literal["none", "inputs", "math", "float"]


@dataclasses.dataclass(frozen=True)
class Lowering:
    """How one aten operator is computed in JAX.

    Attributes:
        name: schema name with overload, such as `aten::add.Tensor`.
        function: the pure JAX function.
        promote: what happens to tensor arguments (and scalars passed as tensor arguments) before
            the call. `"none"`: nothing; `"inputs"`: all are cast to `torch.result_type` of them;
            `"math"`: the same, but 16-bit floats are computed in float32, as torch does, and the
            result is rounded once; `"float"`: like `"math"`, and integers and bool become the
            default float dtype.
        lift: names of scalar arguments that change between steps (learning rates, bias
            corrections). A float argument arrives as a 0-d array, so that its value is an input
            of the compiled program and never a reason to recompile.
        random: the function takes a JAX PRNG key before all other arguments. The name of a scalar
            argument: it draws only where that argument is not 0; else the key is None.
        writes: names of arguments that torch updates though the schema may not declare so. The
            function returns their new values after its results (None for one that was None).
        strided: the function takes `contiguous=`, whether the first tensor is in row-major order
            (torch's gradient formulas of some operators depend on it).
        meta: gives the results' shapes and dtypes where torch has no kernel for `meta` tensors: a
            function of the operator's arguments, with `meta` tensors in, and `meta` tensors out.
        sized: the function takes `shape=`, what torch promises of its first result.
    """

    name: str
    function: Callable[..., Any]
    promote: Promotion = "none"
    lift: tuple[str, ...] = ()
    random: bool | str = False
    writes: tuple[str, ...] = ()
    strided: bool = False
    meta: Callable[..., Any] | None = None
    sized: bool = False


_TABLE: dict[str, Lowering] = {}


def lower(
    *names: str,
    promote: Promotion = "none",
    lift: tuple[str, ...] = (),
    random: bool | str = False,
    writes: tuple[str, ...] = (),
    strided: bool = False,
    meta: Callable[..., Any] | None = None,
    sized: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate the JAX function that computes each operator in `names`.

    Args:
        *names: schema names, `"aten::add.Tensor"`; an overload called `default` is left out.
        promote: see `Lowering`.
        lift: see `Lowering`.
        random: see `Lowering`.
        writes: see `Lowering`.
        strided: see `Lowering`.
        meta: see `Lowering`.
        sized: see `Lowering`.

    Returns:
        A decorator that registers its function and returns it unchanged.

    Raises:
        ValueError: an operator has a lowering already.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            if name in _TABLE:
                raise ValueError(f"{name} has a lowering already: {_TABLE[name].function}")
            _TABLE[name] = Lowering(
                name, function, promote, lift, random, writes, strided, meta, sized
            )
        return function

    return register


def register_lowering(
    name: str, function: Callable[..., Any], *, promote: Promotion = "none"
) -> Callable[..., Any]:
    """Register the lowering of an operator for the `jax` device, or replace it.

    Args:
        name: schema name, `"aten::relu"` or `"mylib::op.overload"`.
        function: a pure JAX function of the operator's arguments in schema order.
        promote: see `Lowering`.

    Returns:
        `function`.

    Example:
        >>> import torch
        >>> with torch.library._scoped_library("doc", "DEF") as library:
        ...     _ = library.define("twice(Tensor x) -> Tensor")
        ...     library.impl("twice", lambda x: torch.empty_like(x), "Meta")
        ...     _ = register_lowering("doc::twice", lambda x: 2 * x)
        ...     torch.ops.doc.twice(torch.ones(2, device="jax"))
        tensor([2., 2.], device='jax:0')
    """
    return lower(name, promote=promote)(function)


def find(op: OpOverload) -> Lowering | None:
    """The lowering of exactly this overload, or None."""
    return _TABLE.get(op.name())


def named(name: str) -> Lowering:
    """The lowering registered under a schema name.

    Raises:
        KeyError: there is none.
    """
    return _TABLE[name]


def shape_function(op: OpOverload) -> Callable[..., Any]:
    """What to run on `meta` tensors to learn the results' shapes: `op`, or an override."""
    lowering = _TABLE.get(op.name())
    return op if lowering is None or lowering.meta is None else lowering.meta


def names() -> tuple[str, ...]:
    """The schema names of every operator with a lowering, sorted."""
    return tuple(sorted(_TABLE))
