"""A jaxpr with its calls inlined, whose values and operations have ids.

What is computed twice in a scope is written once (CSE). Calls (`jit`, `checkpoint`, custom
derivatives) are inlined, as XLA does. Loops and branches keep their bodies as
scopes. What a `scan` takes a row of is a dynamic slice inside its body, and what it stacks a
dynamic update, as they are when JAX lowers it.

>>> import jax
>>> import jax.numpy as jnp
>>> def layers(x, w):
...     return jax.lax.scan(lambda h, one: (jnp.tanh(h @ one), None), x, w)[0]
>>> flat = flattened(jax.make_jaxpr(layers)(jnp.ones((8, 4)), jnp.ones((12, 4, 4))))
>>> [op.name for op in flat.scope.ops], [op.name for op in flat.scope.ops[0].bodies[0].ops]
(['scan'], ['edge', 'row', 'dot_general', 'tanh', 'edge', 'edge'])
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from isoshard.core.kit import Body, Literal, Space, bodies, cached, is_elementwise

from .dimension_rules import declared_rule, dimension_rule, elementwise_rule
from .factors import DimensionRule, Factors, Shape
from .primitive_rules import broadcast_in_dim

CONSTANT = -1
"""The id of all values that depend on constants only: each use computes its own."""


def equation_key(equation: Any, operands: tuple[int, ...], new: Mapping[Any, Any]) -> Any:
    """The key of an equation for CSE; None if equations with it may differ."""
    if equation.effects:
        return None
    constants = tuple(
        [
            _bits(var.val) if isinstance(var, Literal) else new.get(var, id(var))
            for var, operand in zip(equation.invars, operands, strict=True)
            if operand == CONSTANT
        ]
    )
    params = tuple([param for param in equation.params.items() if "jaxpr" not in param[0]])
    aval = equation.outvars[0].aval if equation.outvars else None
    key = (equation.primitive.name, operands, constants, params, getattr(aval, "dtype", None))
    try:
        hash(key)
    except TypeError:  # a parameter has no hash
        return None
    return key


def _bits(value: Any) -> tuple[Any, ...]:
    """A constant's elements; its `repr` would take long."""
    array = np.asarray(value)
    return array.dtype, array.shape, array.tobytes()


@dataclasses.dataclass(slots=True, eq=False)
class FlatOp:
    """One operation.

    Attributes:
        name: of the primitive; "row" and "stack" of a scan's xs and ys, "edge" of a value
            that is the same inside and outside of a loop.
        equation: the jaxpr's, for its parameters and source line; None of edges.
        rule: which axes belong together.
        operands: ids of values.
        results: likewise.
        bodies: of a loop or branches.
    """

    name: str
    equation: Any
    rule: DimensionRule
    operands: tuple[int, ...]
    results: tuple[int, ...]
    bodies: tuple[BodyScope, ...] = ()


@dataclasses.dataclass(slots=True, eq=False)
class BodyScope:
    """Operations that run one after the other.

    Attributes:
        ops: in the program's order.
        kind: "step" of the outermost, else that of its `nested_programs.Body`.
        times: how often it runs each time that its operation does.
        results: values that are alive at its end.
        carried: (result, input) that are one value from run to run.
        inputs: of a "manual" one, (index of the operation's operand, value inside).
        arguments: values inside that are passed in from outside.
    """

    ops: list[FlatOp]
    kind: str
    times: int = 1
    inputs: tuple[tuple[int, int], ...] = ()
    results: tuple[int, ...] = ()
    carried: tuple[tuple[int, int], ...] = ()
    arguments: frozenset[int] = frozenset()


class FlatProgram:
    """Values by id, and the scope of the step.

    Attributes:
        shapes: of each value: the global one, or inside of a `shard_map` of its devices' blocks.
        itemsizes: bytes of one element of each value; 0 in the memory of the host.
        dtypes: names.
        scope: the operations.
        inputs: ids of the program's inputs.
        results: ids of its results.
        manual: values inside of a `shard_map`, of which only other axes can be split.
        uses_declared_rules: operators that declare their rule (`declared_rule`) are one operation.
        variables: those of the program, and of its loops and branches -> ids.
    """

    def __init__(self) -> None:
        """Nothing in it yet."""
        self.shapes: list[Shape] = []
        self.itemsizes: list[int] = []
        self.dtypes: list[str] = []
        self.inputs: tuple[int, ...] = ()
        self.results: tuple[int, ...] = ()
        self.scope = BodyScope([], "step")
        self.manual: set[int] = set()
        self.uses_declared_rules = False
        self.variables: dict[Any, int] = {}

    def value(self, aval: Any) -> int:
        """Add a value."""
        itemsize, name = _element(getattr(aval, "dtype", None), getattr(aval, "memory_space", None))
        self.shapes.append(getattr(aval, "shape", ()))
        self.itemsizes.append(itemsize)
        self.dtypes.append(name)
        return len(self.shapes) - 1

    def size(self, value: int) -> int:
        """Number of elements of a value."""
        return math.prod(self.shapes[value])


def flattened(program: Any, *, declared: bool = False) -> FlatProgram:
    """Inline the calls of a program.

    Args:
        program: a closed jaxpr.
        declared: use rules that operators of `custom_partitioning` declare.
    """
    flat = FlatProgram()
    flat.uses_declared_rules = declared
    jaxpr = program.jaxpr
    ids: dict[Any, int] = dict.fromkeys(jaxpr.constvars, CONSTANT)
    for variable in jaxpr.invars:
        ids[variable] = flat.value(variable.aval)
    flat.inputs = tuple(ids[var] for var in jaxpr.invars)
    _write(flat, flat.scope, jaxpr, ids, {})
    flat.results = tuple(_value_id(var, ids) for var in jaxpr.outvars)
    flat.scope.results = flat.results
    flat.variables |= ids
    _without_dead(flat.scope)
    return flat


_SPLITTABLE = frozenset(
    "broadcast_in_dim iota reshape squeeze transpose convert_element_type expand_dims empty "
    "empty2 slice concatenate pad split".split()
)


def _value_id(variable: Any, ids: Mapping[Any, int]) -> int:
    return CONSTANT if isinstance(variable, Literal) else ids[variable]


def _write(
    flat: FlatProgram,
    scope: BodyScope,
    jaxpr: Any,
    ids: dict[Any, int],
    visited: dict[Any, tuple[int, ...]],
) -> None:
    """Write out a jaxpr; `visited` has the results of what the scope already computes."""
    new: dict[Any, Any] = {}
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        operands = tuple([_value_id(var, ids) for var in equation.invars])
        constant = not any(operand != CONSTANT for operand in operands)
        if constant and (name in _SPLITTABLE or is_elementwise(name)):
            key = equation_key(equation, operands, new)
            for var in equation.outvars:
                ids[var] = CONSTANT
                new[var] = key
            continue
        declared = declared_rule(equation) if flat.uses_declared_rules else None
        inner = () if declared else bodies(equation)
        if not inner:
            key = equation_key(equation, operands, new)
            results = visited.get(key) if key is not None else None
            if results is None:
                results = tuple([flat.value(var.aval) for var in equation.outvars])
                rule = declared or dimension_rule(equation)
                if is_elementwise(name):
                    rule, operands = _expanded(flat, scope, equation, rule, operands, results)
                scope.ops.append(FlatOp(name, equation, rule, operands, results))
                if key is not None:
                    visited[key] = results
            for var, result in zip(equation.outvars, results, strict=True):
                ids[var] = result
        elif inner[0].kind == "call":
            _call(flat, scope, equation, inner[0], operands, ids, visited)
        else:
            results = tuple([flat.value(var.aval) for var in equation.outvars])
            for var, result in zip(equation.outvars, results, strict=True):
                ids[var] = result
            scopes = tuple(_body(flat, var, equation, operands, results) for var in inner)
            rule = dimension_rule(equation)
            scope.ops.append(FlatOp(name, equation, rule, operands, results, scopes))


def _expanded(
    flat: FlatProgram,
    scope: BodyScope,
    equation: Any,
    rule: DimensionRule,
    operands: tuple[int, ...],
    results: tuple[int, ...],
) -> tuple[DimensionRule, tuple[int, ...]]:
    """Operands of the result's shape: smaller ones are broadcast before, as JAX lowers them."""
    shape = flat.shapes[results[0]]
    expanded = list(operands)
    for n, operand in enumerate(operands):
        before = () if operand == CONSTANT else flat.shapes[operand]
        if before and before != shape and len(before) == len(shape):
            expanded[n] = value = len(flat.shapes)
            flat.shapes.append(shape)
            flat.itemsizes.append(flat.itemsizes[operand])
            flat.dtypes.append(flat.dtypes[operand])
            broadcast = _broadcast(before, shape)
            scope.ops.append(FlatOp("broadcast_in_dim", equation, broadcast, (operand,), (value,)))
    if tuple(expanded) == operands:
        return rule, operands
    shapes = tuple([() if operand == CONSTANT else flat.shapes[operand] for operand in expanded])
    return elementwise_rule(shapes, (shape,) * len(results)), tuple(expanded)


def _call(
    flat: FlatProgram,
    scope: BodyScope,
    equation: Any,
    body: Body,
    operands: Sequence[int],
    ids: dict[Any, int],
    visited: dict[Any, tuple[int, ...]],
) -> None:
    inside: dict[Any, int] = dict.fromkeys(body.jaxpr.constvars, CONSTANT)
    for link in body.operands:
        inside[body.jaxpr.invars[link.inside]] = operands[link.outside]
    if equation.params.get("differentiated") and equation.params.get("prevent_cse", True):
        # jax.checkpoint: what is computed again must not be merged with what was computed before.
        for variable in body.jaxpr.invars:
            if inside[variable] != CONSTANT:
                fresh = flat.value(variable.aval)
                rule = identity(flat.shapes[fresh])
                old = (inside[variable],)
                scope.ops.append(FlatOp("optimization_barrier", equation, rule, old, (fresh,)))
                inside[variable] = fresh
    _write(flat, scope, body.jaxpr, inside, visited)
    for link in body.results:
        ids[equation.outvars[link.outside]] = _value_id(body.jaxpr.outvars[link.inside], inside)


def _body(
    flat: FlatProgram,
    body: Body,
    equation: Any,
    operands: tuple[int, ...],
    results: tuple[int, ...],
) -> BodyScope:
    scope = BodyScope([], body.kind, body.times)
    first = len(flat.shapes)
    inside: dict[Any, int] = dict.fromkeys(body.jaxpr.constvars, CONSTANT)
    carried = {after: before for before, after in body.carried}
    outside = {link.inside: link.outside for link in body.results}
    for link in body.operands:
        variable, operand = body.jaxpr.invars[link.inside], operands[link.outside]
        if operand == CONSTANT and link.inside not in carried:
            inside[variable] = CONSTANT
            continue
        inside[variable] = index = flat.value(variable.aval)
        if link.leading:
            rule = _row(flat.shapes[operand])
            scope.ops.append(FlatOp("row", equation, rule, (operand,), (index,)))
        elif body.kind != "manual" and operand != CONSTANT:
            rule = identity(flat.shapes[index])
            scope.ops.append(FlatOp("edge", None, rule, (operand,), (index,)))
    _write(flat, scope, body.jaxpr, inside, {})
    flat.variables |= inside
    ends = tuple(_value_id(var, inside) for var in body.jaxpr.outvars)
    for link in body.results:
        result, end = results[link.outside], ends[link.inside]
        if end == CONSTANT:
            continue
        if link.leading:
            rule = _stack(flat.shapes[result])
            scope.ops.append(FlatOp("stack", equation, rule, (end,), (result,)))
        elif body.kind != "manual":
            rule = identity(flat.shapes[end])
            scope.ops.append(FlatOp("edge", None, rule, (end,), (result,)))
    loops = []
    for end, start in body.carried:
        before = inside[body.jaxpr.invars[start]]
        loops.append((ends[end], before))
        if end in outside and ends[end] != CONSTANT:
            rule = identity(flat.shapes[before])
            scope.ops.append(FlatOp("edge", None, rule, (results[outside[end]],), (before,)))
    scope.results = ends
    scope.carried = tuple(loops)
    scope.arguments = frozenset([inside[var] for var in body.jaxpr.invars])
    if body.kind == "manual":
        scope.inputs = tuple(
            (link.outside, inside[body.jaxpr.invars[link.inside]]) for link in body.operands
        )
        flat.manual.update(range(first, len(flat.shapes)))
    return scope


@cached(1 << 12)
def identity(shape: Shape) -> DimensionRule:
    """The rule of a value that is passed on."""
    factors = Factors((shape,), (shape,))
    for axis, size in enumerate(shape):
        factors.tie({0: axis}, {0: axis}, size)
    return factors.rule()


@cached(1 << 12)
def _broadcast(before: Shape, after: Shape) -> DimensionRule:
    axes = {"broadcast_dimensions": tuple(range(len(after)))}
    return broadcast_in_dim(Factors((before,), (after,)), axes)


@cached(1 << 12)
def _row(shape: Shape) -> DimensionRule:
    factors = Factors((shape,), (shape[1:],))
    for axis, size in enumerate(shape[1:]):
        factors.tie({0: axis + 1}, {0: axis}, size)
    return factors.rule(rest_unsharded=True)


@cached(1 << 12)
def _stack(shape: Shape) -> DimensionRule:
    factors = Factors((shape[1:],), (shape,))
    for axis, size in enumerate(shape[1:]):
        factors.tie({0: axis}, {0: axis + 1}, size)
    return factors.rule(rest_unsharded=True)


def _without_dead(scope: BodyScope, used: set[int] | None = None) -> None:
    """Drop operations whose results are unused (DCE), as XLA does."""
    used = set() if used is None else used
    used.update(scope.results if scope.kind == "step" else ())
    starts = {start for _, start in scope.carried}
    rows = []
    for op in reversed(scope.ops):
        passed = op.name == "edge" or (op.equation is not None and op.equation.effects)
        if op.name == "edge" and op.results[0] in scope.arguments - starts:
            passed = False
        if passed or any(result in used for result in op.results):
            rows.append(op)
            if not op.bodies or op.bodies[0].kind != "scan":
                used.update(op.operands)
            for body in reversed(op.bodies):
                if body.kind == "scan":
                    _drop_unread(op, body, used)
                else:
                    used.update(body.results)
                _without_dead(body, used)
    scope.ops = rows[::-1]


def _drop_unread(op: FlatOp, body: BodyScope, used: set[int]) -> None:
    """Drop unused ys of a scan; its xs are read by its body's operations."""
    count = len(body.carried)
    saved = [n for n, result in enumerate(op.results) if n < count or result in used]
    op.results = tuple([op.results[n] for n in saved])
    body.results = tuple([body.results[n] for n in saved])
    used.update(end for end, _ in body.carried)


@cached(1 << 12)
def _element(dtype: Any, space: Any) -> tuple[int, str]:
    """Bytes of an element, and the name of its dtype; of random keys eight, on the host none."""
    if dtype is None:
        return 0, ""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return 8, str(dtype)
    return 0 if space is Space.Host else dtype.itemsize, str(dtype)
