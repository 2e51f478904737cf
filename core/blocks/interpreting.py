"""Interpreting: a jaxpr traced at true shapes, run on padded arrays, primitive by primitive.

Each primitive has a rule (`lifting.rules`), which takes the equation and its `Value`s. One without
a rule runs at the true shapes: its operands are unpacked, so that nothing of padding reaches it,
and its results are not split.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from isoshard.core.layout.axis_types import is_typed, under_auto
from isoshard.core.runtime._jax_internals.jaxpr_classes import ClosedJaxpr, JaxprEqn
from isoshard.core.runtime._jax_internals.tracers import Tracer
from isoshard.core.runtime.jaxprs import PLAIN_CALLS, evaluate
from isoshard.core.runtime.jaxprs import bind as bind_primitive

from .block_values import Value, as_value
from .splits import AxisSplit

Rule = Callable[[JaxprEqn, list[Value]], Sequence[Value]]
RULES: dict[str, Rule] = {}
_RECORDING = contextvars.ContextVar("recording", default=False)
_ALWAYS: set[str] = set()


def rule(*names: str, always: bool = False) -> Callable[[Rule], Rule]:
    """Register the rule of some primitives, by their names."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        if always:
            _ALWAYS.update(names)
        return function

    return register


def bind(eqn: JaxprEqn, arrays: Sequence[Any], **changed: Any) -> list[Any]:
    """Run the primitive of an equation on other operands."""
    return bind_primitive(eqn, arrays, **{**_under_auto(eqn.params), **changed})


def _under_auto(params: dict[str, Any]) -> dict[str, Any]:
    """Parameters without the shardings of types: values here have none."""
    return {
        name: None if name in ("sharding", "out_sharding") and _is_typed(value) else value
        for name, value in params.items()
    }


def _is_typed(sharding: Any) -> bool:
    return isinstance(sharding, NamedSharding) and is_typed(sharding.mesh)


def run_unpacked(eqn: JaxprEqn, values: Sequence[Value]) -> list[Value]:
    """Run an equation on unpacked operands."""
    return [as_value(x) for x in bind(eqn, [value.unpacked().array for value in values])]


def pack_like(results: Sequence[Value], splits: Sequence[AxisSplit | None]) -> list[Value]:
    """Repack results where an axis has its former size."""
    packed = []
    for value in results:
        if len(value.splits) == len(splits):
            for axis, split in enumerate(splits):
                if split is not None and value.shape[axis] == split.extent:
                    value = value.packed(axis, split)
        packed.append(value)
    return packed


def interpret_program(program: Any, values: Sequence[Value]) -> list[Value]:
    """Run a jaxpr, closed or not, that was traced at the true shapes."""
    return evaluate(program, values, _run, _constant)


def _run(eqn: JaxprEqn, operands: list[Value]) -> Sequence[Value]:
    apply = RULES.get(eqn.primitive.name, run_unpacked)
    touched = any(map(_is_annotated, operands)) or _has_rule(eqn)
    return apply(eqn, operands) if touched else _plain(eqn, operands)


def _is_annotated(value: Value) -> bool:
    """Whether a value has splits, a slice's origin, or hints."""
    return value.uneven or bool(value.sliced_from) or any(value.hints)


def _has_rule(eqn: JaxprEqn) -> bool:
    """Whether an equation, or one inside the call that it is, has a rule for unsplit operands.

    So has a call of arrays on Explicit axes, which are under Auto axes here.
    """
    if eqn.primitive.name in _ALWAYS:
        return True
    if eqn.primitive.name not in PLAIN_CALLS:
        return False
    inside: Any = eqn.params[PLAIN_CALLS[eqn.primitive.name]]
    typed = any(_is_typed(getattr(atom.aval, "sharding", None)) for atom in eqn.invars)
    return typed or any(map(_has_rule, inside.eqns))


def _plain(eqn: JaxprEqn, operands: Sequence[Value]) -> list[Value]:
    """Run an equation whose operands are in no blocks; results of constants are constants."""
    results = bind(eqn, [value.array for value in operands])
    fixed = all(value.fixed for value in operands)
    return [as_value(x, fixed=fixed) for x in results]


def _constant(const: Any) -> Value:
    if isinstance(const, Value):
        return const
    const = under_auto(const) if isinstance(const, jax.Array) else const
    return as_value(const, fixed=not isinstance(const, Tracer))


def trace(function: Callable[..., Any], arguments: Sequence[Any]) -> tuple[ClosedJaxpr, Any]:
    """Trace a function at given shapes, to be interpreted."""
    before = _RECORDING.set(True)
    try:
        closed, out = jax.make_jaxpr(function, return_shape=True)(*arguments)
    finally:
        _RECORDING.reset(before)
    return closed, jax.tree.structure(out)


def recording() -> bool:
    """Whether a function is being traced to be interpreted on blocks."""
    return _RECORDING.get()
