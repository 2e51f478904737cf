"""The tape: operations waiting to be compiled together.

Every torch operation on the `jax` device becomes one entry, `(recipe number, input slots)`. Recipes
and inputs are interned to integers, so the entries of a training step are the key under which its
compiled program is found again.

A tape belongs to one thread. A value recorded on another thread's tape, or needed while JAX traces,
is computed first (`materialize`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.core import Tracer

from isoshard.core.devices import Device
from isoshard.core.errors import ShardingError

from . import layouts, random
from .value import Value

LIMIT = 100_000
"""Entries after which a tape is executed even if nobody asked for a value."""


class Recipe:
    """What one kind of tape entry computes.

    Attributes:
        number: its place in `RECIPES`, the part of a compile key.
        name: for error messages and reports.
        run: `(inputs, scalars, key) -> list of arrays`, pure JAX.
        count: how many results it has.
        random: whether it draws random numbers.
        lifted: how many lifted floats it takes.
        detail: what program optimisations may want to know (an operator, or a view chain).
    """

    __slots__ = ("count", "detail", "lifted", "name", "number", "random", "run")

    def __init__(
        self,
        name: str,
        run: Callable[..., Sequence[Any]],
        count: int,
        *,
        random: bool = False,
        lifted: int = 0,
        detail: Any = None,
    ):
        """Register a recipe."""
        self.number = len(RECIPES)
        self.name = name
        self.run = run
        self.count = count
        self.random = random
        self.lifted = lifted
        self.detail = detail
        RECIPES.append(self)


RECIPES: list[Recipe] = []


class Recorder(Protocol):
    """Where operations go: a `Tape`, or `Immediate` while JAX traces."""

    def record(
        self, recipe: Recipe, inputs: Sequence[Value], scalars: Sequence[Any] = ()
    ) -> list[Value]:
        """Add an operation and return its results."""
        ...

    def view(self, whole: Value, chain: Any) -> Value | None:
        """The value of a view that was read before, or None."""
        ...

    def keep_view(self, whole: Value, chain: Any, part: Value) -> None:
        """Remember the value of a view."""
        ...


class Tape:
    """Entries recorded by one thread since the last `sync`.

    Attributes:
        values: every value it knows, by slot: inputs and results.
        program: the compile key so far: for an input, its interned shape and dtype; for an
            operation, its recipe's number and input slots.
        leaves: slots of the inputs.
        marks: the layouts that its constraints ask for.
        scalars: the lifted floats, in order of use.
        views: slots of views already read, by slot of the storage's value and view chain.
        words: the random keys taken.
        done: it was executed (perhaps by another thread), and takes nothing more.
        failed: it could not be executed as a whole.
        home: the devices of the mesh that its inputs lie on, in order; empty while none does.
    """

    __slots__ = (
        "done",
        "failed",
        "home",
        "leaves",
        "marks",
        "program",
        "scalars",
        "values",
        "views",
        "words",
    )

    def __init__(self):
        """An empty tape."""
        self.values: list[Value] = []
        self.program: list[Any] = []
        self.leaves: list[int] = []
        self.marks: set[int] = set()
        self.scalars: list[Any] = []
        self.views: dict[tuple[int, Any], int] = {}
        self.words: list[random.Word] = []
        self.done = False
        self.failed = False
        self.home: tuple[Device, ...] = ()

    def record(
        self, recipe: Recipe, inputs: Sequence[Value], scalars: Sequence[Any] = ()
    ) -> list[Value]:
        """Add an operation and return its (recorded) results."""
        if self.done or len(self.program) > LIMIT:
            return self._successor().record(recipe, inputs, scalars)
        values = self.values
        entry = [recipe.number]
        for value in inputs:
            if value.tape is not self:
                if value.layout >= 0 and not self.joins(value.layout):
                    return self._on_another_mesh(recipe, inputs, scalars)
                self._add_leaf(value)
            entry.append(value.slot)
        slot = len(values)
        results = []
        for _ in range(recipe.count):
            value = Value()
            value.tape = self
            value.slot = slot
            slot += 1
            results.append(value)
        values += results
        self.program.append(tuple(entry))
        if scalars:
            self.scalars += scalars
        if recipe.random:
            self.words.append(random.take())
        return results

    def refuse(self) -> None:
        """Nothing speaks against executing it."""

    def _successor(self) -> Recorder:
        """The tape to go on with after this one was executed, or grew too long."""
        from . import program

        if not self.done:
            program.execute(self)
        if recorder() is self:
            replace(Tape())
        return recorder()

    def view(self, whole: Value, chain: Any) -> Value | None:
        """The value of a view that was read before."""
        slot = self.views.get((whole.slot, chain)) if whole.tape is self else None
        return None if slot is None else self.values[slot]

    def keep_view(self, whole: Value, chain: Any, part: Value) -> None:
        """Remember the value of a view for as long as the tape lives."""
        if whole.tape is self and part.tape is self:
            self.views[whole.slot, chain] = part.slot

    def joins(self, layout: int) -> bool:
        """Whether a layout is over the devices of this tape; the first one decides."""
        devices = layouts.devices(layout)
        if len(devices) < 2 or devices == self.home:
            return True
        if not self.home:
            self.home = devices
            return True
        return False

    def _on_another_mesh(
        self, recipe: Recipe, inputs: Sequence[Value], scalars: Sequence[Any]
    ) -> list[Value]:
        """Execute what is here, and go on with a tape for the other mesh.

        Raises:
            ShardingError: this one operation has inputs on both.
        """
        from . import program

        groups = {
            self.home if value.tape is self else layouts.devices(value.layout)
            for value in inputs
            if value.tape is self or value.layout >= 0
        }
        groups = {group for group in groups if len(group) > 1}
        if len(groups) > 1:
            orders = " and ".join(str([device.id for device in group]) for group in groups)
            raise ShardingError(
                f"{recipe.name} has operands on meshes that number the devices differently: "
                f"{orders}. Mark both with the same mesh, or move one with "
                "isoshard.reshard(tensor, spec, mesh)."
            )
        program.execute(self)
        return recorder().record(recipe, inputs, scalars)

    def _add_leaf(self, value: Value) -> None:
        array = value.array
        if array is None:
            materialize([value])
            array = value.array
        value.tape = self
        value.slot = len(self.values)
        self.leaves.append(value.slot)
        self.values.append(value)
        self.program.append((array.shape, array.dtype))


class Immediate:
    """Runs operations at once: used while JAX traces, and inside decompositions.

    Args:
        keys: an iterator of PRNG keys for random operations, or None if there are none.
        imports: CPU tensors among the operands are constants, and no mistake.
    """

    __slots__ = ("imports", "keys")

    def __init__(self, keys: Any = None, *, imports: bool = False):
        """See the class."""
        self.keys = keys
        self.imports = imports

    def record(
        self, recipe: Recipe, inputs: Sequence[Value], scalars: Sequence[Any] = ()
    ) -> list[Value]:
        """Compute an operation on arrays or tracers."""
        arrays = []
        for value in inputs:
            if value.array is None:
                materialize([value])
            arrays.append(jnp.asarray(value.array))
        key = None
        if recipe.random:
            if self.keys is None:
                raise RuntimeError(
                    f"{recipe.name} draws random numbers, but this function was traced without a "
                    "key: pass rng=jax.random.key(seed) when you call it, or use .eval()"
                )
            key = next(self.keys)
        lifted = [jnp.asarray(scalar, random.scalar_dtype()) for scalar in scalars]
        with jax.numpy_dtype_promotion("standard"):
            return [Value(array) for array in recipe.run(arrays, lifted, key)]

    def view(self, whole: Value, chain: Any) -> None:
        """Nothing is remembered: a traced value must not outlive its trace."""

    def keep_view(self, whole: Value, chain: Any, part: Value) -> None:
        """See `view`."""


class _Current(threading.local):
    def __init__(self):
        self.recorder: Recorder = Tape()


_CURRENT = _Current()


def recorder() -> Recorder:
    """Where this thread's operations go now."""
    return _CURRENT.recorder


def replace(new: Recorder) -> Recorder:
    """Send this thread's operations elsewhere; returns what took them before."""
    old = _CURRENT.recorder
    _CURRENT.recorder = new
    return old


class immediately:
    """Context in which operations run at once on arrays or tracers."""

    def __init__(self, keys: Any = None, *, imports: bool = False):
        """See `Immediate`."""
        self._new = Immediate(keys, imports=imports)

    def __enter__(self) -> None:
        """Switch."""
        self._old = replace(self._new)

    def __exit__(self, *exc: object) -> None:
        """Switch back."""
        replace(self._old)


def materialize(values: Sequence[Value]) -> None:
    """Make sure that every value has an array, executing the tapes that hold them."""
    from . import program

    for value in values:
        if value.array is None:
            program.execute(value.tape, value if value.tape.failed else None)


def takes_constants() -> bool:
    """Whether `jax_function` runs torch code on this thread: JAX differentiates what it does."""
    return getattr(_CURRENT.recorder, "imports", False)


def is_tracing() -> bool:
    """Whether operations run at once, on tracers."""
    return isinstance(_CURRENT.recorder, Immediate) or isinstance(jnp.zeros(()), Tracer)
