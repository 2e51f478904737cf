"""Operators that say themselves how they are split, as one operation of a JAX trace.

`custom_partitioning.partitioned` makes them. JAX has no derivative and no batching rule for what
it asks how to split, so that stands in the program of an operation that has them:

| of the operation | computes |
|---|---|
| itself | `ask`, which the compiler splits as it says; for `jax.export`, which cannot write that \
down, `whole` |
| its derivatives | those of `whole`, which the compiler splits as it can; of an operator that \
is `linear` operators again |
| under `jax.vmap` | an operator again, which is split along the axis that is mapped, too |
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from isoshard.core.runtime._jax_internals.jaxpr_classes import jaxpr_as_fun
from isoshard.core.runtime._jax_internals.primitive_rules import (
    Zero,
    for_export,
    is_undefined_primal,
    lower_fun,
)
from isoshard.core.runtime.primitives import new_primitive

Static = Any
"""The static arguments of an operator: hashable. Their `repr` says all of them, and the same in
every process: no addresses."""

Pulls = tuple[Callable[..., Any] | None, ...]
"""Of an operator that is linear in each of its operands, for each of them: a function of the
result's cotangent and the operands that gives the operand's cotangent, and does not ask for the
operand's values. None for one whose values do not count."""


class Mapped(NamedTuple):
    """The static arguments of an operator under `jax.vmap`.

    Attributes:
        static: those of the operator.
        axes: whether it is axis 0 of each operand; None for an operand that is None.
    """

    static: Static
    axes: tuple[bool | None, ...]

    def over(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`jax.vmap` of a function of the operands."""
        return jax.vmap(function, [0 if own else None for own in self.axes])


class SplitOperator(NamedTuple):
    """A function `(static, *operands)`; an operand is an array or None.

    Attributes:
        whole: as for `partitioned`.
        ask: gives for static arguments a function `(operands, stamp)`, in which JAX meets the
            operator, and the stamp.
        mapped: gives the same under `jax.vmap`.
        linear: as for `partitioned`.
    """

    whole: Callable[..., Any]
    ask: Callable[[Static], tuple[Callable[..., Any], np.ndarray]]
    mapped: Callable[[], SplitOperator]
    linear: Callable[[Static], Pulls | None]

    def __call__(self, static: Static, *operands: Any) -> Any:
        """What `whole` computes."""
        function, stamp = self.ask(static)
        leaves, structure = jax.tree.flatten((operands, jnp.asarray(stamp)))

        def run(*leaves: Any) -> Any:
            return function(*jax.tree.unflatten(structure, leaves))

        program, shapes = jax.make_jaxpr(run, return_shape=True)(*leaves)
        params = {"operator": self, "static": static, "structure": structure, "jaxpr": program}
        results = _split_operator.bind(*leaves, **params)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)


def _run(*leaves: Any, jaxpr: Any, **_: Any) -> list[Any]:
    return jaxpr_as_fun(jaxpr)(*leaves)


def _lowered(context: Any, *values: Any, **params: Any) -> Any:
    def whole(*leaves: Any, **params: Any) -> Any:
        return _whole_of((), leaves, params)()

    run = whole if for_export(context) else _run
    return lower_fun(run, multiple_results=True)(context, *values, **params)


def _results(*_: Any, jaxpr: Any, **__: Any) -> list[Any]:
    return list(jaxpr.out_avals)


def _whole_of(which: Sequence[int], leaves: Sequence[Any], params: dict[str, Any]) -> Any:
    """What an operator computes, as a function of those operands alone."""

    def run(*changing: Any) -> list[Any]:
        given = list(leaves)
        for number, leaf in zip(which, changing, strict=True):
            given[number] = leaf
        operands, _ = jax.tree.unflatten(params["structure"], given)
        return jax.tree.leaves(params["operator"].whole(params["static"], *operands))

    return run


def _moved(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    results = _split_operator.bind(*primals, **params)
    which = [number for number, one in enumerate(tangents) if not isinstance(one, Zero)]
    pulls = params["operator"].linear(params["static"])
    if pulls is not None:
        counted = [number for number in which if pulls[number] is not None]
        steps = [
            _split_operator.bind(*primals[:at], tangents[at], *primals[at + 1 :], **params)
            for at in counted
        ]
        if not steps:
            return results, [Zero(jax.typeof(one).to_tangent_aval()) for one in results]
        return results, [functools.reduce(jnp.add, of) for of in zip(*steps, strict=True)]
    at, along = ([leaves[number] for number in which] for leaves in (primals, tangents))
    _, found = jax.jvp(_whole_of(which, primals, params), at, along)
    return results, [
        Zero(jax.typeof(one).to_tangent_aval()) if step.dtype == jax.dtypes.float0 else step
        for one, step in zip(results, found, strict=True)
    ]


def _pulled(slopes: Sequence[Any], *leaves: Any, **params: Any) -> list[Any]:
    which = [number for number, one in enumerate(leaves) if is_undefined_primal(one)]
    full = [
        jnp.zeros(aval.shape, aval.dtype) if isinstance(slope, Zero) else slope
        for slope, aval in zip(slopes, params["jaxpr"].out_avals, strict=True)
    ]
    pulls = params["operator"].linear(params["static"])
    if pulls is not None:
        there = [
            jnp.zeros(one.aval.shape, one.aval.dtype) if at in which else one
            for at, one in enumerate(leaves[:-1])
        ]
        functions = [pull if at in which else None for at, pull in enumerate(pulls)]
        return [*(pull and pull(*full, *there) for pull in functions), None]  # none of the stamp
    run = _whole_of(which, leaves, params)
    found = jax.linear_transpose(run, *(leaves[number].aval for number in which))(full)
    given = dict(zip(which, found, strict=True))
    return [given.get(number) for number in range(len(leaves))]


def _batched(leaves: Sequence[Any], axes: Sequence[Any], **params: Any) -> Any:
    own = [at is not None for at in axes]
    first = [
        jnp.moveaxis(leaf, at, 0) if there else leaf
        for leaf, at, there in zip(leaves, axes, own, strict=True)
    ]
    (operands, _), (mapped, _) = (
        jax.tree.unflatten(params["structure"], some) for some in (first, own)
    )
    static = Mapped(params["static"], tuple(mapped))
    results = jax.tree.leaves(params["operator"].mapped()(static, *operands))
    return results, [0] * len(results)


_split_operator = new_primitive(
    "split_operator",
    _run,
    _results,
    lowering=_lowered,
    transpose=_pulled,
    jvp=_moved,
    batch=_batched,
    several=True,
)
