"""A traced program with its calls written out, so that values and operations have numbers.

What is computed twice in a scope is written once (CSE). Calls (`jit`, `checkpoint`, custom
derivatives) are written out where they stand, as XLA does. Loops and branches keep their bodies as
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

from isoshard.core.runtime._jax_internals.jaxpr_classes import Literal
from isoshard.core.runtime._jax_internals.undocumented import Space
from isoshard.core.runtime.caches import cached
from isoshard.core.runtime.jaxprs import is_elementwise
from isoshard.core.runtime.nested_programs import Body, bodies

from .common_expressions import CONSTANT, equation_key
from .dimension_rules import dimension_rule, elementwise_rule
from .factors import DimensionRule, Factors, Shape
from .moved_dimensions import broadcast_in_dim
from .said_rules import said_rule


@dataclasses.dataclass(slots=True, eq=False)
class FlatOp:
    """One operation.

    Attributes:
        name: of the primitive; "row" and "stack" of what a scan takes and gives, "edge" of a value
            that is the same inside and outside of a loop.
        equation: the jaxpr's, for its parameters and source line; None of edges.
        rule: which axes belong together.
        operands: numbers of values.
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
        kind: "step" of the whole, else as `nested_programs.Body` says.
        times: how often it runs each time that it is met.
        results: values that are alive at its end.
        carried: (result, input) that are one value from run to run.
        inputs: of a "manual" one, (number of the operation's operand, value inside).
        given: values inside that are one outside.
    """

    ops: list[FlatOp]
    kind: str
    times: int = 1
    inputs: tuple[tuple[int, int], ...] = ()
    results: tuple[int, ...] = ()
    carried: tuple[tuple[int, int], ...] = ()
    given: frozenset[int] = frozenset()


class FlatProgram:
    """Values by number, and the scope of the whole step.

    Attributes:
        shapes: of each value: the global one, or inside of a `shard_map` of its devices' blocks.
        itemsizes: bytes of one element of each value; 0 in the memory of the host.
        dtypes: names.
        scope: the operations.
        inputs: numbers of the program's inputs.
        results: numbers of its results.
        manual: values inside of a `shard_map`, of which only other axes can be split.
        said: operators that say their rule themselves are one operation.
        variables: of the program's own variables, the number of each.
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
        self.said = False
        self.variables: dict[Any, int] = {}

    def value(self, aval: Any) -> int:
        """Add a value.

        Args:
            aval: what JAX knows of it.
        """
        itemsize, name = _element(getattr(aval, "dtype", None), getattr(aval, "memory_space", None))
        self.shapes.append(getattr(aval, "shape", ()))
        self.itemsizes.append(itemsize)
        self.dtypes.append(name)
        return len(self.shapes) - 1

    def size(self, value: int) -> int:
        """Elements of the whole value."""
        return math.prod(self.shapes[value])


def flattened(program: Any, *, said: bool = False) -> FlatProgram:
    """Write out a program.

    Args:
        program: a closed jaxpr.
        said: operators that say their rule themselves are one operation, not what they compute.
    """
    flat = FlatProgram()
    flat.said = said
    jaxpr = program.jaxpr
    names: dict[Any, int] = dict.fromkeys(jaxpr.constvars, CONSTANT)
    for variable in jaxpr.invars:
        names[variable] = flat.value(variable.aval)
    flat.inputs = tuple(names[one] for one in jaxpr.invars)
    _write(flat, flat.scope, jaxpr, names, {})
    flat.results = tuple(_number(one, names) for one in jaxpr.outvars)
    flat.scope.results = flat.results
    flat.variables = names
    _without_dead(flat.scope)
    return flat


_SPLITTABLE = frozenset(
    "broadcast_in_dim iota reshape squeeze transpose convert_element_type expand_dims empty "
    "empty2 slice concatenate pad split".split()
)


def _number(variable: Any, names: Mapping[Any, int]) -> int:
    return CONSTANT if isinstance(variable, Literal) else names[variable]


def _write(
    flat: FlatProgram,
    scope: BodyScope,
    jaxpr: Any,
    names: dict[Any, int],
    seen: dict[Any, tuple[int, ...]],
) -> None:
    """Write out a jaxpr; `seen` has the results of what the scope already computes."""
    made: dict[Any, Any] = {}
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        operands = tuple([_number(one, names) for one in equation.invars])
        constant = not any(one != CONSTANT for one in operands)
        if constant and (name in _SPLITTABLE or is_elementwise(name)):
            key = equation_key(equation, operands, made)
            for one in equation.outvars:
                names[one] = CONSTANT
                made[one] = key
            continue
        own = said_rule(equation) if flat.said else None
        inner = () if own else bodies(equation)
        if not inner:
            key = equation_key(equation, operands, made)
            results = seen.get(key) if key is not None else None
            if results is None:
                results = tuple([flat.value(one.aval) for one in equation.outvars])
                rule = own or dimension_rule(equation)
                if is_elementwise(name):
                    rule, operands = _expanded(flat, scope, equation, rule, operands, results)
                scope.ops.append(FlatOp(name, equation, rule, operands, results))
                if key is not None:
                    seen[key] = results
            for one, number in zip(equation.outvars, results, strict=True):
                names[one] = number
        elif inner[0].kind == "call":
            _call(flat, scope, equation, inner[0], operands, names, seen)
        else:
            results = tuple([flat.value(one.aval) for one in equation.outvars])
            for one, number in zip(equation.outvars, results, strict=True):
                names[one] = number
            parts = tuple(_body(flat, one, equation, operands, results) for one in inner)
            rule = dimension_rule(equation)
            scope.ops.append(FlatOp(name, equation, rule, operands, results, parts))


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
    found = list(operands)
    for n, one in enumerate(operands):
        given = () if one == CONSTANT else flat.shapes[one]
        if given and given != shape and len(given) == len(shape):
            found[n] = value = len(flat.shapes)
            flat.shapes.append(shape)
            flat.itemsizes.append(flat.itemsizes[one])
            flat.dtypes.append(flat.dtypes[one])
            broadcast = _broadcast(given, shape)
            scope.ops.append(FlatOp("broadcast_in_dim", equation, broadcast, (one,), (value,)))
    if tuple(found) == operands:
        return rule, operands
    shapes = tuple([() if one == CONSTANT else flat.shapes[one] for one in found])
    return elementwise_rule(shapes, (shape,) * len(results)), tuple(found)


def _call(
    flat: FlatProgram,
    scope: BodyScope,
    equation: Any,
    body: Body,
    operands: Sequence[int],
    names: dict[Any, int],
    seen: dict[Any, tuple[int, ...]],
) -> None:
    inside: dict[Any, int] = dict.fromkeys(body.jaxpr.constvars, CONSTANT)
    for link in body.operands:
        inside[body.jaxpr.invars[link.inside]] = operands[link.outside]
    if equation.params.get("differentiated") and equation.params.get("prevent_cse", True):
        # What is computed again is kept apart from what was computed before.
        for variable in body.jaxpr.invars:
            if inside[variable] != CONSTANT:
                fresh = flat.value(variable.aval)
                rule = identity(flat.shapes[fresh])
                old = (inside[variable],)
                scope.ops.append(FlatOp("optimization_barrier", equation, rule, old, (fresh,)))
                inside[variable] = fresh
    _write(flat, scope, body.jaxpr, inside, seen)
    for link in body.results:
        names[equation.outvars[link.outside]] = _number(body.jaxpr.outvars[link.inside], inside)


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
        inside[variable] = number = flat.value(variable.aval)
        if link.leading:
            rule = _row(flat.shapes[operand])
            scope.ops.append(FlatOp("row", equation, rule, (operand,), (number,)))
        elif body.kind != "manual" and operand != CONSTANT:
            rule = identity(flat.shapes[number])
            scope.ops.append(FlatOp("edge", None, rule, (operand,), (number,)))
    _write(flat, scope, body.jaxpr, inside, {})
    ends = tuple(_number(one, inside) for one in body.jaxpr.outvars)
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
    scope.given = frozenset([inside[one] for one in body.jaxpr.invars])
    if body.kind == "manual":
        scope.inputs = tuple(
            (link.outside, inside[body.jaxpr.invars[link.inside]]) for link in body.operands
        )
        flat.manual.update(range(first, len(flat.shapes)))
    return scope


@cached(1 << 12)
def identity(shape: Shape) -> DimensionRule:
    """The rule of a value that is passed on.

    Args:
        shape: of the value.
    """
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
    return factors.rule(rest_whole=True)


@cached(1 << 12)
def _stack(shape: Shape) -> DimensionRule:
    factors = Factors((shape[1:],), (shape,))
    for axis, size in enumerate(shape[1:]):
        factors.tie({0: axis}, {0: axis + 1}, size)
    return factors.rule(rest_whole=True)


def _without_dead(scope: BodyScope, used: set[int] | None = None) -> None:
    """Drop operations whose results nobody uses, as XLA does."""
    used = set() if used is None else used
    used.update(scope.results if scope.kind == "step" else ())
    starts = {start for _, start in scope.carried}
    kept = []
    for op in reversed(scope.ops):
        passed = op.name == "edge" or (op.equation is not None and op.equation.effects)
        if op.name == "edge" and op.results[0] in scope.given - starts:
            passed = False
        if passed or any(one in used for one in op.results):
            kept.append(op)
            if not op.bodies or op.bodies[0].kind != "scan":
                used.update(op.operands)
            for body in reversed(op.bodies):
                if body.kind == "scan":
                    _drop_unread(op, body, used)
                else:
                    used.update(body.results)
                _without_dead(body, used)
    scope.ops = kept[::-1]


def _drop_unread(op: FlatOp, body: BodyScope, used: set[int]) -> None:
    """Drop what a scan stacks and nobody reads; what it takes is read by its body's operations."""
    count = len(body.carried)
    kept = [n for n, one in enumerate(op.results) if n < count or one in used]
    op.results = tuple([op.results[n] for n in kept])
    body.results = tuple([body.results[n] for n in kept])
    used.update(end for end, _ in body.carried)


@cached(1 << 12)
def _element(dtype: Any, space: Any) -> tuple[int, str]:
    """Bytes of an element, and the name of its dtype; of random keys eight, on the host none."""
    if dtype is None:
        return 0, ""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return 8, str(dtype)
    return 0 if space is Space.Host else dtype.itemsize, str(dtype)
