"""A function with two implementations: for arrays, and for arrays in blocks.

>>> import jax.numpy as jnp
>>> from isoshard.core.lifting.lifting import lift
>>> from isoshard.domain.windows.running_scan import cumsum
>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.transfer.device_put import shard
>>> running = in_blocks(jnp.cumsum, lambda u: cumsum(u, 0))
>>> running(jnp.arange(4)).tolist()                      # as `jnp.cumsum`
[0, 1, 3, 6]
>>> mesh = make_mesh((4,), ("x",))
>>> u = shard(jnp.arange(18), mesh, ("x",), uneven="pad", sizes=(5, 2, 7, 4))
>>> lift(lambda x: running(x) * 2)(u).sizes              # by the rule: nothing is gathered
((5, 2, 7, 4),)

JAX sees the first: it is traced, differentiated and compiled as if it were called directly.
Where a function is traced to be interpreted on blocks (by `interpreting.trace`, as in `lift`), the
call is recorded as one primitive, which the interpreter replaces with the second, the rule, if
an operand is in blocks. Its JVP and its transpose are recorded as such calls too, each with two
implementations: that of the function and that of the rule.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from isoshard.core.blocks.block_values import Frame, Value
from isoshard.core.blocks.interpreting import interpret_program, recording, rule, trace
from isoshard.core.blocks.uneven_values import operand_of, placed, value_of
from isoshard.core.errors import ShardingError
from isoshard.core.layout.uneven import is_uneven
from isoshard.core.runtime._jax_internals.jaxpr_classes import JaxprEqn
from isoshard.core.runtime._jax_internals.primitive_rules import Zero, is_undefined_primal
from isoshard.core.runtime.primitives import new_primitive

from .value_calls import on_arrays, results_of

Rule = Callable[[list[Value]], Any]  # gives a list of values, or None: it declines


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
    """The callee, on flat lists of arrays or values.

    Attributes:
        function: of global arrays.
        rule: of values.
        results: what the function gives, as JAX's abstract values.
        primal: of a derivative, the call it is of.
        moving: of a derivative, which operands of `primal` change.
    """

    function: Callable[..., list[Any]]
    rule: Rule
    results: tuple[Any, ...]
    primal: _Call | None = None
    moving: tuple[int, ...] = ()


def in_blocks(function: Callable[..., Any], rule: Callable[..., Any]) -> Callable[..., Any]:
    """Define a function on arrays in blocks.

    Args:
        function: of arrays and trees of them, and of nothing else: close over what is static, and
            over no array that is traced.
        rule: the same of `UnevenArray`s; called with at least one, other operands unsplit. An axis
            of theirs that is not padded is P.UNCONSTRAINED in `.layout` where its sharding is
            unknown. It returns the function's results, in blocks or not, or `NotImplemented`: then
            the function is interpreted primitive by primitive. Derivatives are taken through it, so
            it has them.

    Returns:
        A function of the same arguments. Under `jax.vmap` it is `function` alone.

    Raises:
        ShardingError: inside `lift`: the rule's results are not of the function's shapes.

    Example:
        >>> from isoshard.domain import lift, pack
        >>> from isoshard.domain.windows.pad import roll
        >>> back = in_blocks(lambda x: jnp.roll(x, 1), lambda u: roll(u, 1, 0))
        >>> u = pack(jnp.arange(5), jax.make_mesh((4,), ("x",)), ("x",))
        >>> lift(back)(u).sizes, back(jnp.arange(3)).tolist()
        (((2, 2, 1, 0),), [2, 0, 1])
    """

    @functools.wraps(function)
    def called(*operands: Any) -> Any:
        if not recording():
            return function(*operands)
        leaves, structure = jax.tree.flatten(operands)

        def flat(*leaves: Any) -> list[Any]:
            return jax.tree.leaves(function(*jax.tree.unflatten(structure, leaves)))

        closed, out = jax.make_jaxpr(
            lambda *leaves: function(*jax.tree.unflatten(structure, leaves)), return_shape=True
        )(*leaves)
        shapes = [tuple(aval.shape) for aval in closed.out_avals]

        def by_rule(values: list[Value]) -> list[Value] | None:
            if not placed(values):
                return None
            outputs = rule(*jax.tree.unflatten(structure, [operand_of(value) for value in values]))
            if outputs is NotImplemented:
                return None
            values_out = [value_of(x) for x in jax.tree.leaves(outputs, is_leaf=is_uneven)]
            _check(
                getattr(rule, "__name__", "a rule"), [value.shape for value in values_out], shapes
            )
            return values_out

        call = _Call(flat, by_rule, tuple(closed.out_avals))
        return jax.tree.unflatten(jax.tree.structure(out), _in_blocks.bind(*leaves, call=call))

    return called


@rule("in_blocks")
def interpreted(eqn: JaxprEqn, values: list[Value]) -> Sequence[Value]:
    """The rule; where it declines, the function."""
    call = eqn.params["call"]
    results = call.rule(values)
    if results is not None:
        return results
    shapes = [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in values]
    return interpret_program(trace(call.function, shapes)[0], values)


def _batched(arrays: Sequence[Any], axes: Sequence[Any], *, call: _Call) -> Any:
    results = jax.vmap(call.function, in_axes=tuple(axes))(*arrays)
    return results, [0] * len(results)


def _derivative(primals: Sequence[Any], tangents: Sequence[Any], *, call: _Call) -> Any:
    """The JVP: the results, and their tangents, by a call of its own, linear in the tangents."""
    results = _in_blocks.bind(*primals, call=call)
    moving = tuple(i for i, x in enumerate(tangents) if not isinstance(x, Zero))
    count, flowing = len(primals), _inexact(call.results)

    def pushed(*arrays: Any) -> list[Any]:
        primals_in, tangents_in = arrays[:count], arrays[count:]
        return jax.jvp(
            _of(call.function, primals_in, moving, flowing), _at(primals_in, moving), tangents_in
        )[1]

    def by_rule(values: list[Value]) -> list[Value] | None:
        run, results = _run(call, values[:count])
        if run is None:
            return None
        primals_in = [value.array for value in values[:count]]
        tangents_in = [
            value.with_splits(values[i].splits).with_zeros().array
            for i, value in zip(moving, values[count:], strict=True)
        ]
        tangents_out = jax.jvp(
            _of(run, primals_in, moving, flowing), _at(primals_in, moving), tangents_in
        )[1]
        return [results[i].of(x) for i, x in zip(flowing, tangents_out, strict=True)]

    changed = _Call(pushed, by_rule, tuple(_at(call.results, flowing)), call, moving)
    moving_tangents = _at(tangents, moving)
    pushed_to = dict(
        zip(flowing, _in_blocks.bind(*primals, *moving_tangents, call=changed), strict=True)
        if moving_tangents
        else ()
    )
    return results, [
        pushed_to[i] if i in pushed_to else Zero(jax.typeof(x).to_tangent_aval())
        for i, x in enumerate(results)
    ]


def _transposed(cotangents: Sequence[Any], *operands: Any, call: _Call) -> list[Any]:
    """The transpose of a JVP: the gradients of the operands in which it is linear."""
    primal, moving = call.primal, call.moving
    linear = [i for i, x in enumerate(operands) if is_undefined_primal(x)]
    instantiated = [_instantiated(x) for x in cotangents]
    count = len(operands) - len(moving)
    if primal is None or linear != list(range(count, len(operands))):
        return _transposed_inside(instantiated, operands, call)
    flowing = _inexact(primal.results)

    def pulled(*arrays: Any) -> list[Any]:
        primals_in, cotangents_in = arrays[:count], arrays[count:]
        pull = jax.vjp(_of(primal.function, primals_in, moving, flowing), *_at(primals_in, moving))[
            1
        ]
        return list(pull(list(cotangents_in)))

    def by_rule(values: list[Value]) -> list[Value] | None:
        run, results = _run(primal, values[:count])
        if run is None:
            return None
        primals_in = [value.array for value in values[:count]]
        cotangents_in = [
            value.with_splits(results[i].splits).with_zeros().array
            for i, value in zip(flowing, values[count:], strict=True)
        ]
        pull = jax.vjp(_of(run, primals_in, moving, flowing), *_at(primals_in, moving))[1]
        return [values[i].frame.of(x) for i, x in zip(moving, pull(cotangents_in), strict=True)]

    results = tuple(operands[i].aval for i in linear)
    operand_cotangents = _in_blocks.bind(
        *operands[:count], *instantiated, call=_Call(pulled, by_rule, results)
    )
    return [None] * count + operand_cotangents


def _transposed_inside(cotangents: list[Any], operands: Sequence[Any], call: _Call) -> list[Any]:
    """The transpose of a call that is linear by itself: of the function alone."""
    linear = tuple(i for i, x in enumerate(operands) if is_undefined_primal(x))
    shapes = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in _at(operands, linear)]
    run = _of(call.function, operands, linear, tuple(range(len(cotangents))))
    by_index = dict(zip(linear, jax.linear_transpose(run, *shapes)(cotangents), strict=True))
    return [by_index.get(i) for i in range(len(operands))]


_in_blocks = new_primitive(
    "in_blocks",
    lambda *arrays, call: call.function(*arrays),
    lambda *_, call: list(call.results),
    transpose=_transposed,
    jvp=_derivative,
    batch=_batched,
    several=True,
    devices=True,  # where no operand is in blocks, the function may have operators that need them
)


def _of(
    function: Callable[..., Sequence[Any]],
    operands: Sequence[Any],
    moving: tuple[int, ...],
    flowing: tuple[int, ...],
) -> Callable[..., list[Any]]:
    """Some results as a function of some operands."""

    def run(*arrays: Any) -> list[Any]:
        moved = dict(zip(moving, arrays, strict=True))
        return _at(function(*(moved.get(i, x) for i, x in enumerate(operands))), flowing)

    return run


def _run(call: _Call, values: list[Value]) -> tuple[Any, list[Frame]]:
    """A rule as a function of arrays, and the frames of its results; None if it declines."""
    declined = False

    def inside(values: list[Value]) -> list[Value]:
        nonlocal declined
        outputs = call.rule(values)
        declined = outputs is None
        return [] if outputs is None else outputs

    results = results_of(inside, values)
    if declined:
        return None, []
    return on_arrays(inside, [value.frame for value in values], results), results


def _check(
    name: str, shapes_in_blocks: list[tuple[int, ...]], shapes: list[tuple[int, ...]]
) -> None:
    if shapes_in_blocks != shapes:
        raise ShardingError(
            f"{name} returns, in blocks, results of shapes {shapes_in_blocks}, "
            f"and the function gives {shapes}; return the same true shapes from both"
        )


def _instantiated(x: Any) -> Any:
    if not isinstance(x, Zero):
        return x
    aval: Any = x.aval
    return jnp.zeros(aval.shape, aval.dtype)


def _inexact(results: Sequence[Any]) -> tuple[int, ...]:
    return tuple(i for i, x in enumerate(results) if jnp.issubdtype(x.dtype, jnp.inexact))


def _at(items: Sequence[Any], which: Sequence[int]) -> list[Any]:
    return [items[i] for i in which]
