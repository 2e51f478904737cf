"""Flat programs: what a JAX function computes as one list of primitives, and the layouts in it.

>>> import jax.numpy as jnp
>>> from jax.sharding import PartitionSpec as P
>>> from isoshard.core.layout.mesh import make_mesh
>>> halves = NamedSharding(make_mesh((2,), ("data",)), P("data"))
>>> @jax.jit
... def inner(x):
...     return jax.lax.with_sharding_constraint(jax.nn.relu(x), halves)
>>> program = flat_program(lambda x, unread: inner(x) + 1, [jnp.ones(4), jnp.ones(2)])
>>> [step.primitive.name for step in program.steps]
['max', 'sharding_constraint', 'add']
>>> program.read, [layout.spec for layout in program.layouts]
((0,), [P('data',)])
>>> program(jnp.asarray([-1.0, 2.0, 3.0, 4.0]))          # the result, then the values laid out
[Array([1., 3., 4., 5.], dtype=float32), Array([0., 2., 3., 4.], dtype=float32)]

Calls (`jit`, `checkpoint`, functions with gradients of their own) are written out, and so is
`scan`, turn by turn: ONNX's Loop has no layouts inside. What nothing depends on is left out. The
layouts of `jit`'s own arguments and results count as constraints.

On Explicit axes `reshard` and `out_sharding=` say layouts, and types carry them on. They are
constraints in the program as well, which is itself without types:

>>> split = NamedSharding(jax.make_mesh((2,), ("data",)), P("data"))
>>> program = flat_program(lambda x: jnp.exp(jax.sharding.reshard(x, split)), [jnp.ones(4)])
>>> [step.primitive.name for step in program.steps], program.layouts == (split,)
(['sharding_constraint', 'exp'], True)
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding

from isoshard.core.kit import (
    CALLS,
    ClosedJaxpr,
    JaxprEqn,
    auto,
    constrain,
    evaluate,
    is_typed,
    jaxprs_inside,
    named_sharding,
    needed,
    on_mesh,
    opened,
    replaced,
    same_grid,
    scan_counts,
    spec_over,
    stored,
    under_auto,
    unreduced,
)
from isoshard.onnx_bridge.errors import ModelError

_CONSTRAINT = "sharding_constraint"
_WRITTEN_OUT = {*CALLS, "scan"}
_RANDOM = ("random_", "threefry", "rng_")
_PARTS = ("shard_map", "xla_pmap", "pmap")
_RESHARD = "reshard"
_TYPES = ("sharding", "out_sharding")  # of an operation on Explicit axes, about its result


@dataclasses.dataclass(frozen=True, eq=False)
class FlatProgram:
    """A program without calls. Call it with the inputs that it reads.

    Attributes:
        jaxpr: traced; its results are those of the function, then the values sharded.
        steps: those of its equations that a result depends on.
        read: positions of the inputs that a result depends on.
        results: how many results the function has.
        layouts: of the values that come after them, in the order they were met.
        input_layouts: by position of an input the sharding that a `jit` around everything declares.
    """

    jaxpr: ClosedJaxpr
    steps: tuple[JaxprEqn, ...]
    read: tuple[int, ...]
    results: int
    layouts: tuple[Any, ...]
    input_layouts: dict[int, Any]

    def __call__(self, *inputs: Any) -> list[Any]:
        """Compute it, under Auto axes, with those inputs that are read."""
        args = dict.fromkeys(range(len(opened(self.jaxpr).invars)))
        inputs = tuple(under_auto(x) if isinstance(x, jax.Array) else x for x in inputs)
        args.update(zip(self.read, inputs, strict=True))
        with untyped_context():
            return evaluate(
                replaced(self.jaxpr, eqns=list(self.steps)), [*args.values()], _bind_untyped
            )


def flat_program(fn: Callable[..., Any], inputs: Sequence[Any]) -> FlatProgram:
    """Trace a function.

    Raises:
        ModelError: it draws random numbers, works on shards (`shard_map`), leaves sums to be taken
            (unreduced axes), or lays values out inside `while` or `cond`; all errors are collected.
    """
    traced = jax.make_jaxpr(fn)(*inputs)
    errors = list(dict.fromkeys(_unsupported(traced)))
    if errors:
        raise ModelError("\n  ".join(["the function cannot be written as ONNX:", *errors]))
    notes = _Notes()

    def flat(*leaves: Any) -> list[Any]:
        notes.start(leaves)
        results = _run(traced, leaves, notes)
        return [*results, *notes.values]

    with untyped_context():
        traced_flat = jax.make_jaxpr(flat)(*map(_untyped, inputs))
    steps = tuple(needed(opened(traced_flat).eqns, opened(traced_flat).outvars))
    read_ids = {id(atom) for eqn in steps for atom in eqn.invars}
    read_ids.update(id(atom) for atom in opened(traced_flat).outvars)
    return FlatProgram(
        traced_flat,
        steps,
        tuple(at for at, var in enumerate(opened(traced_flat).invars) if id(var) in read_ids),
        len(opened(traced_flat).outvars) - len(notes.layouts),
        tuple(notes.layouts),
        notes.input_layouts,
    )


def untyped_context() -> contextlib.AbstractContextManager[Any]:
    """Where values made by a program are on Auto axes, whatever mesh `jax.set_mesh` has set."""
    mesh = jax.sharding.get_abstract_mesh()
    return (
        jax.sharding.use_abstract_mesh(auto(mesh)) if is_typed(mesh) else contextlib.nullcontext()
    )


def _untyped(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if _is_typed(x) else x


def _is_typed(x: Any) -> bool:
    return _over_types(getattr(x, "sharding", None))


def _over_types(sharding: Any) -> bool:
    return isinstance(sharding, NamedSharding) and is_typed(sharding.mesh)


class _Notes:
    """The shardings that a program has, collected while it is flattened."""

    def start(self, leaves: Sequence[Any]) -> None:
        self.leaves = {id(leaf): at for at, leaf in enumerate(leaves)}
        self.values: list[Any] = []
        self.layouts: list[Any] = []
        self.input_layouts: dict[int, Any] = {}

    def value(self, value: Any, layout: Any) -> None:
        self.values.append(value)
        self.layouts.append(layout)

    def constrained(self, value: Any, layout: Any) -> Any:
        """The sharding that a `jit` declares for an argument or result; kept for program inputs."""
        if not isinstance(layout, NamedSharding):
            return value
        if id(value) in self.leaves:
            self.input_layouts.setdefault(self.leaves[id(value)], layout)
            return value
        constrained = constrain(value, on_mesh(layout, auto(layout.mesh)))
        self.value(constrained, layout)
        return constrained

    def record(self, value: Any, layout: NamedSharding, kind: AxisType = AxisType.Explicit) -> Any:
        """The value in a layout; itself if it was just sharded so along axes of that type."""
        for recorded, recorded_sharding in zip(self.values, self.layouts, strict=True):
            if recorded is value and _same_sharding(recorded_sharding, layout, kind):
                return value
        constrained = constrain(value, on_mesh(layout, auto(layout.mesh)))
        self.value(constrained, layout)
        return constrained


def _same_sharding(first: Any, other: NamedSharding, kind: AxisType) -> bool:
    if not isinstance(first, NamedSharding) or not same_grid(first.mesh, other.mesh):
        return False
    return spec_over(first.spec, other.mesh, kind) == spec_over(other.spec, other.mesh, kind)


def _run(program: Any, args: Sequence[Any], notes: _Notes) -> list[Any]:
    """Evaluate a program, closed or not."""
    return evaluate(program, args, functools.partial(_results, notes))


def _results(notes: _Notes, eqn: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
    """The results of one equation; calls and scans are written out."""
    name = eqn.primitive.name
    if name in CALLS:
        return _call(eqn, operands, notes)
    if name == "scan":
        return _scan(eqn, operands, notes)
    if name in _LOOPS and any(_is_typed(atom.aval) for atom in eqn.invars):
        return _LOOPS[name](eqn, operands, notes)
    if name == _CONSTRAINT and _over_types(eqn.params["sharding"]):
        return [notes.record(operands[0], eqn.params["sharding"], AxisType.Auto)]
    if name == _RESHARD:
        layout = _declared(eqn, eqn.params["dst_sharding"])
        return [operands[0] if layout is None else notes.record(operands[0], layout)]
    results = _bind_untyped(eqn, operands)
    if name == _CONSTRAINT:
        notes.value(results[0], eqn.params["sharding"])
    elif layout := _declared(eqn, eqn.params.get("out_sharding")):
        results = [notes.record(results[0], layout)]
    return results


def _call(eqn: JaxprEqn, operands: Sequence[Any], notes: _Notes) -> list[Any]:
    body = eqn.params[CALLS[eqn.primitive.name]]
    shardings = eqn.params.get("in_shardings", (None,) * len(operands))
    operands = [
        notes.constrained(value, layout) for value, layout in zip(operands, shardings, strict=True)
    ]
    results = _run(body, operands, notes)
    shardings = eqn.params.get("out_shardings", (None,) * len(results))
    return [
        notes.constrained(value, layout) for value, layout in zip(results, shardings, strict=True)
    ]


def _scan(eqn: JaxprEqn, operands: Sequence[Any], notes: _Notes) -> list[Any]:
    """All turns of a loop whose number is known, one after the other."""
    body, length = eqn.params["jaxpr"], eqn.params["length"]
    fixed, num_carry = scan_counts(eqn.params)
    consts, carry = list(operands[:fixed]), list(operands[fixed : fixed + num_carry])
    turns = range(length - 1, -1, -1) if eqn.params["reverse"] else range(length)
    rows: dict[int, list[Any]] = {}
    for turn in turns:
        row = [
            jax.lax.index_in_dim(x, turn, 0, keepdims=False) for x in operands[fixed + num_carry :]
        ]
        outputs = _run(body, [*consts, *carry, *row], notes)
        carry, rows[turn] = outputs[:num_carry], outputs[num_carry:]
    if not length:
        shapes: list[Any] = [var.aval for var in eqn.outvars[num_carry:]]
        outs = [jnp.zeros(shape.shape, shape.dtype) for shape in shapes]
        return [*carry, *outs]
    columns = zip(*(rows[turn] for turn in range(length)), strict=True)
    return [*carry, *(_stacked(column) for column in columns)]


def _while(eqn: JaxprEqn, operands: Sequence[Any], notes: _Notes) -> list[Any]:
    """The loop again, of values without types."""
    read, fixed = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    goes_on, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    cond_consts, consts, start = (
        operands[:read],
        operands[read : read + fixed],
        operands[read + fixed :],
    )
    outputs = jax.lax.while_loop(
        lambda carry: _run(goes_on, [*cond_consts, *carry], notes)[0],
        lambda carry: _run(body, [*consts, *carry], notes),
        list(start),
    )
    return list(outputs)


def _cond(eqn: JaxprEqn, operands: Sequence[Any], notes: _Notes) -> list[Any]:
    """The branches again, of values without types."""
    branches = [
        functools.partial(_branch, branch, notes=notes) for branch in eqn.params["branches"]
    ]
    return list(jax.lax.switch(operands[0], branches, *operands[1:]))


def _branch(body: ClosedJaxpr, *args: Any, notes: _Notes) -> list[Any]:
    return _run(body, args, notes)


_LOOPS = {"while": _while, "cond": _cond}


def _declared(eqn: JaxprEqn, sharding: Any) -> NamedSharding | None:
    """The layout that an operation on Explicit axes gives its result, or None."""
    if not _over_types(sharding):
        return None
    mesh = eqn.params.get("concrete_mesh") or sharding.mesh
    aval: Any = eqn.outvars[0].aval
    return named_sharding(stored(sharding).spec, mesh, aval.ndim)


def _stacked(column: Sequence[Any]) -> Any:
    return jax.lax.concatenate([jax.lax.expand_dims(row, (0,)) for row in column], 0)


def _bind_untyped(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """The primitive without the layouts of types; a constraint keeps its own.

    The equation's context has the mesh of types, so it is not entered.
    """
    params = dict(eqn.params)
    if eqn.primitive.name != _CONSTRAINT:
        params.update((key, None) for key in _TYPES if key in params)
    results = eqn.primitive.bind(*operands, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


def _unsupported(program: Any, around: str = "") -> Iterator[str]:
    jaxpr = opened(program)
    for eqn in needed(jaxpr.eqns, jaxpr.outvars):
        yield from _unsupported_in(eqn, around)


def _unsupported_in(eqn: JaxprEqn, around: str) -> Iterator[str]:
    name = eqn.primitive.name
    if name.startswith(_RANDOM):
        yield (
            f"{name}: it draws random numbers, and those of a file would be others; for dropout "
            "call model.eval() first, or pass the numbers as an argument"
        )
    elif name in _PARTS:
        yield (
            f"{name}: its body works on shards, and a file has the maths of one device; write it "
            "for global arrays with jax.lax.with_sharding_constraint"
        )
    elif (left := _open_sum(eqn)) is not None:
        yield (
            f"{name}: {left} leaves a sum to be taken, for which a file has no words; "
            "reshard it to a spec without unreduced="
        )
    elif around and (name == _CONSTRAINT or _declared(eqn, eqn.params.get("dst_sharding"))):
        yield f"{name} inside {around}: ONNX's loops have no layouts inside; shard values outside"
    else:
        for body in jaxprs_inside(eqn.params):
            yield from _unsupported(body, around or (name if name not in _WRITTEN_OUT else ""))


def _open_sum(eqn: JaxprEqn) -> Any:
    """The spec of a result whose sum is still to be taken, or None."""
    shardings = [eqn.params.get(key) for key in (*_TYPES, "dst_sharding")]
    return next(
        (sharding.spec for sharding in shardings if sharding is not None and unreduced(sharding)),
        None,
    )
