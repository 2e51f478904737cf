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

from isoshard.core.layout.axis_types import (
    auto,
    constrain,
    is_typed,
    on_mesh,
    same_grid,
    spec_over,
    under_auto,
)
from isoshard.core.layout.partial_sums import stored, unreduced
from isoshard.core.layout.spec import named_sharding
from isoshard.core.runtime._jax_internals.jaxpr_classes import ClosedJaxpr, JaxprEqn
from isoshard.core.runtime.jaxprs import (
    CALLS,
    evaluate,
    jaxprs_inside,
    needed,
    opened,
    replaced,
    scan_counts,
)

from ..errors import ModelError

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
        jaxpr: traced; its results are those of the function, then the values laid out.
        steps: those of its equations that a result depends on.
        read: positions of the inputs that a result depends on.
        results: how many results the function has.
        layouts: of the values that come after them, in the order they were met.
        given: by position of an input what a `jit` around everything says of it.
    """

    jaxpr: ClosedJaxpr
    steps: tuple[JaxprEqn, ...]
    read: tuple[int, ...]
    results: int
    layouts: tuple[Any, ...]
    given: dict[int, Any]

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
            (unreduced axes), or lays values out inside `while` or `cond`; all faults are collected.
    """
    traced = jax.make_jaxpr(fn)(*inputs)
    faults = list(dict.fromkeys(_faults(traced)))
    if faults:
        raise ModelError("\n  ".join(["the function cannot be written as ONNX:", *faults]))
    notes = _Notes()

    def flat(*leaves: Any) -> list[Any]:
        notes.start(leaves)
        results = _run(traced, leaves, notes)
        return [*results, *notes.values]

    with untyped_context():
        whole = jax.make_jaxpr(flat)(*map(_untyped, inputs))
    steps = tuple(needed(opened(whole).eqns, opened(whole).outvars))
    asked = {id(atom) for step in steps for atom in step.invars}
    asked.update(id(atom) for atom in opened(whole).outvars)
    return FlatProgram(
        whole,
        steps,
        tuple(at for at, var in enumerate(opened(whole).invars) if id(var) in asked),
        len(opened(whole).outvars) - len(notes.layouts),
        tuple(notes.layouts),
        notes.given,
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
    """The layouts that are met while a program is written out."""

    def start(self, leaves: Sequence[Any]) -> None:
        self.leaves = {id(leaf): at for at, leaf in enumerate(leaves)}
        self.values: list[Any] = []
        self.layouts: list[Any] = []
        self.given: dict[int, Any] = {}

    def value(self, value: Any, layout: Any) -> None:
        self.values.append(value)
        self.layouts.append(layout)

    def asked(self, value: Any, layout: Any) -> Any:
        """What a `jit` says of an argument or result; an input of the whole program keeps it."""
        if not isinstance(layout, NamedSharding):
            return value
        if id(value) in self.leaves:
            self.given.setdefault(self.leaves[id(value)], layout)
            return value
        laid = constrain(value, on_mesh(layout, auto(layout.mesh)))
        self.value(laid, layout)
        return laid

    def laid(self, value: Any, layout: NamedSharding, kind: AxisType = AxisType.Explicit) -> Any:
        """The value in a layout; itself if it was just laid out so along axes of that type."""
        for noted, said in zip(self.values, self.layouts, strict=True):
            if noted is value and _alike(said, layout, kind):
                return value
        laid = constrain(value, on_mesh(layout, auto(layout.mesh)))
        self.value(laid, layout)
        return laid


def _alike(one: Any, other: NamedSharding, kind: AxisType) -> bool:
    if not isinstance(one, NamedSharding) or not same_grid(one.mesh, other.mesh):
        return False
    return spec_over(one.spec, other.mesh, kind) == spec_over(other.spec, other.mesh, kind)


def _run(program: Any, args: Sequence[Any], notes: _Notes) -> list[Any]:
    """Evaluate a program, closed or not."""
    return evaluate(program, args, functools.partial(_results, notes))


def _results(notes: _Notes, step: JaxprEqn, given: Sequence[Any]) -> Sequence[Any]:
    """The results of one equation; calls and scans are written out."""
    name = step.primitive.name
    if name in CALLS:
        return _call(step, given, notes)
    if name == "scan":
        return _scan(step, given, notes)
    if name in _LOOPS and any(_is_typed(atom.aval) for atom in step.invars):
        return _LOOPS[name](step, given, notes)
    if name == _CONSTRAINT and _over_types(step.params["sharding"]):
        return [notes.laid(given[0], step.params["sharding"], AxisType.Auto)]
    if name == _RESHARD:
        layout = _said(step, step.params["dst_sharding"])
        return [given[0] if layout is None else notes.laid(given[0], layout)]
    results = _bind_untyped(step, given)
    if name == _CONSTRAINT:
        notes.value(results[0], step.params["sharding"])
    elif layout := _said(step, step.params.get("out_sharding")):
        results = [notes.laid(results[0], layout)]
    return results


def _call(step: JaxprEqn, given: Sequence[Any], notes: _Notes) -> list[Any]:
    body = step.params[CALLS[step.primitive.name]]
    said = step.params.get("in_shardings", (None,) * len(given))
    given = [notes.asked(value, layout) for value, layout in zip(given, said, strict=True)]
    results = _run(body, given, notes)
    said = step.params.get("out_shardings", (None,) * len(results))
    return [notes.asked(value, layout) for value, layout in zip(results, said, strict=True)]


def _scan(step: JaxprEqn, given: Sequence[Any], notes: _Notes) -> list[Any]:
    """All turns of a loop whose number is known, one after the other."""
    body, length = step.params["jaxpr"], step.params["length"]
    fixed, carried = scan_counts(step.params)
    consts, carry = list(given[:fixed]), list(given[fixed : fixed + carried])
    turns = range(length - 1, -1, -1) if step.params["reverse"] else range(length)
    rows: dict[int, list[Any]] = {}
    for turn in turns:
        row = [jax.lax.index_in_dim(x, turn, 0, keepdims=False) for x in given[fixed + carried :]]
        found = _run(body, [*consts, *carry, *row], notes)
        carry, rows[turn] = found[:carried], found[carried:]
    if not length:
        shapes: list[Any] = [var.aval for var in step.outvars[carried:]]
        outs = [jnp.zeros(one.shape, one.dtype) for one in shapes]
        return [*carry, *outs]
    columns = zip(*(rows[turn] for turn in range(length)), strict=True)
    return [*carry, *(_stacked(column) for column in columns)]


def _while(step: JaxprEqn, given: Sequence[Any], notes: _Notes) -> list[Any]:
    """The loop again, of values without types."""
    read, fixed = step.params["cond_nconsts"], step.params["body_nconsts"]
    goes_on, body = step.params["cond_jaxpr"], step.params["body_jaxpr"]
    asked, consts, start = given[:read], given[read : read + fixed], given[read + fixed :]
    found = jax.lax.while_loop(
        lambda held: _run(goes_on, [*asked, *held], notes)[0],
        lambda held: _run(body, [*consts, *held], notes),
        list(start),
    )
    return list(found)


def _cond(step: JaxprEqn, given: Sequence[Any], notes: _Notes) -> list[Any]:
    """The branches again, of values without types."""
    branches = [functools.partial(_branch, one, notes=notes) for one in step.params["branches"]]
    return list(jax.lax.switch(given[0], branches, *given[1:]))


def _branch(body: ClosedJaxpr, *args: Any, notes: _Notes) -> list[Any]:
    return _run(body, args, notes)


_LOOPS = {"while": _while, "cond": _cond}


def _said(step: JaxprEqn, sharding: Any) -> NamedSharding | None:
    """The layout that an operation on Explicit axes gives its result, or None."""
    if not _over_types(sharding):
        return None
    mesh = step.params.get("concrete_mesh") or sharding.mesh
    made: Any = step.outvars[0].aval
    return named_sharding(stored(sharding).spec, mesh, made.ndim)


def _stacked(column: Sequence[Any]) -> Any:
    return jax.lax.concatenate([jax.lax.expand_dims(row, (0,)) for row in column], 0)


def _bind_untyped(step: JaxprEqn, given: Sequence[Any]) -> list[Any]:
    """The primitive without the layouts of types; a constraint keeps its own.

    The equation's context has the mesh of types, so it is not entered.
    """
    params = dict(step.params)
    if step.primitive.name != _CONSTRAINT:
        params.update((key, None) for key in _TYPES if key in params)
    results = step.primitive.bind(*given, **params)
    return list(results) if step.primitive.multiple_results else [results]


def _faults(program: Any, around: str = "") -> Iterator[str]:
    jaxpr = opened(program)
    for step in needed(jaxpr.eqns, jaxpr.outvars):
        yield from _faults_of(step, around)


def _faults_of(step: JaxprEqn, around: str) -> Iterator[str]:
    name = step.primitive.name
    if name.startswith(_RANDOM):
        yield (
            f"{name}: it draws random numbers, and those of a file would be others; for dropout "
            "call model.eval() first, or pass the numbers as an argument"
        )
    elif name in _PARTS:
        yield (
            f"{name}: its body works on shards, and a file has the maths of one device; write it "
            "for whole arrays with jax.lax.with_sharding_constraint"
        )
    elif (left := _open_sum(step)) is not None:
        yield (
            f"{name}: {left} leaves a sum to be taken, for which a file has no words; "
            "reshard it to a spec without unreduced="
        )
    elif around and (name == _CONSTRAINT or _said(step, step.params.get("dst_sharding"))):
        yield f"{name} inside {around}: ONNX's loops have no layouts inside; lay values out outside"
    else:
        for body in jaxprs_inside(step.params):
            yield from _faults(body, around or (name if name not in _WRITTEN_OUT else ""))


def _open_sum(step: JaxprEqn) -> Any:
    """The spec of a result whose sum is still to be taken, or None."""
    said = [step.params.get(key) for key in (*_TYPES, "dst_sharding")]
    return next((one.spec for one in said if one is not None and unreduced(one)), None)
