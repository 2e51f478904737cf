"""The primitive of operators with their own partitioning, with derivative and batching rules.

`custom_partitioning.partitioned` creates them. JAX's custom_partitioning has no derivative and no
batching rule, so its call is in the jaxpr of a primitive that has them:

| of the primitive | computes |
|---|---|
| itself | `call`, partitioned by the operator; for `jax.export`, which cannot serialize that, \
`unsplit` |
| its derivatives | those of `unsplit`, which the compiler partitions; of a `linear` operator \
operators again |
| under `jax.vmap` | an operator again, which is also split along the mapped axis |
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
"""The static arguments of an operator: hashable. Their `repr` is complete, and the same in every
process: it is part of the compilation cache's key, so no addresses."""

Pulls = tuple[Callable[..., Any] | None, ...]
"""Of an operator that is linear in each of its operands, for each of them: a function of the
result's cotangent and the operands that returns the operand's cotangent, and does not read the
operand's values. None for an operand without a cotangent."""


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
        return jax.vmap(function, [0 if is_mapped else None for is_mapped in self.axes])


class SplitOperator(NamedTuple):
    """A function `(static, *operands)`; an operand is an array or None.

    Attributes:
        unsplit: as for `partitioned`.
        call: returns for static arguments a function `(operands, stamp)` that calls the operator,
            and the stamp.
        mapped: returns the operator under `jax.vmap`.
        linear: as for `partitioned`.
    """

    unsplit: Callable[..., Any]
    call: Callable[[Static], tuple[Callable[..., Any], np.ndarray]]
    mapped: Callable[[], SplitOperator]
    linear: Callable[[Static], Pulls | None]

    def __call__(self, static: Static, *operands: Any) -> Any:
        """Compute as `unsplit`, partitioned."""
        function, stamp = self.call(static)
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
    def unsplit(*leaves: Any, **params: Any) -> Any:
        return _unsplit_function((), leaves, params)()

    run = unsplit if for_export(context) else _run
    return lower_fun(run, multiple_results=True)(context, *values, **params)


def _results(*_: Any, jaxpr: Any, **__: Any) -> list[Any]:
    return list(jaxpr.out_avals)


def _unsplit_function(indices: Sequence[int], leaves: Sequence[Any], params: dict[str, Any]) -> Any:
    """The unsplit function of an operator, of the operands at `indices` alone."""

    def run(*changing: Any) -> list[Any]:
        all_leaves = list(leaves)
        for index, leaf in zip(indices, changing, strict=True):
            all_leaves[index] = leaf
        operands, _ = jax.tree.unflatten(params["structure"], all_leaves)
        return jax.tree.leaves(params["operator"].unsplit(params["static"], *operands))

    return run


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    results = _split_operator.bind(*primals, **params)
    indices = [index for index, result in enumerate(tangents) if not isinstance(result, Zero)]
    pulls = params["operator"].linear(params["static"])
    if pulls is not None:
        linear_indices = [index for index in indices if pulls[index] is not None]
        terms = [
            _split_operator.bind(
                *primals[:active_primals],
                tangents[active_primals],
                *primals[active_primals + 1 :],
                **params,
            )
            for active_primals in linear_indices
        ]
        if not terms:
            return results, [Zero(jax.typeof(result).to_tangent_aval()) for result in results]
        return results, [functools.reduce(jnp.add, term) for term in zip(*terms, strict=True)]
    active_primals, active_tangents = (
        [leaves[index] for index in indices] for leaves in (primals, tangents)
    )
    _, out_tangents = jax.jvp(
        _unsplit_function(indices, primals, params), active_primals, active_tangents
    )
    return results, [
        Zero(jax.typeof(result).to_tangent_aval()) if step.dtype == jax.dtypes.float0 else step
        for result, step in zip(results, out_tangents, strict=True)
    ]


def _transpose(cotangents: Sequence[Any], *leaves: Any, **params: Any) -> list[Any]:
    indices = [index for index, leaf in enumerate(leaves) if is_undefined_primal(leaf)]
    full = [
        jnp.zeros(aval.shape, aval.dtype) if isinstance(cotangent, Zero) else cotangent
        for cotangent, aval in zip(cotangents, params["jaxpr"].out_avals, strict=True)
    ]
    pulls = params["operator"].linear(params["static"])
    if pulls is not None:
        operands = [
            jnp.zeros(leaf.aval.shape, leaf.aval.dtype) if at in indices else leaf
            for at, leaf in enumerate(leaves[:-1])
        ]
        functions = [pull if at in indices else None for at, pull in enumerate(pulls)]
        return [*(pull and pull(*full, *operands) for pull in functions), None]  # none of the stamp
    run = _unsplit_function(indices, leaves, params)
    in_cotangents = jax.linear_transpose(run, *(leaves[index].aval for index in indices))(full)
    by_index = dict(zip(indices, in_cotangents, strict=True))
    return [by_index.get(index) for index in range(len(leaves))]


def _batched(leaves: Sequence[Any], axes: Sequence[Any], **params: Any) -> Any:
    mapped_leaves = [at is not None for at in axes]
    first = [
        jnp.moveaxis(leaf, at, 0) if is_mapped else leaf
        for leaf, at, is_mapped in zip(leaves, axes, mapped_leaves, strict=True)
    ]
    (operands, _), (mapped, _) = (
        jax.tree.unflatten(params["structure"], some) for some in (first, mapped_leaves)
    )
    static = Mapped(params["static"], tuple(mapped))
    results = jax.tree.leaves(params["operator"].mapped()(static, *operands))
    return results, [0] * len(results)


_split_operator = new_primitive(
    "split_operator",
    _run,
    _results,
    lowering=_lowered,
    transpose=_transpose,
    jvp=_jvp,
    batch=_batched,
    several=True,
)
