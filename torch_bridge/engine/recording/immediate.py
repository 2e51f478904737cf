"""Operations that run at once: while JAX traces, and inside decompositions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from isoshard.core.runtime._jax_internals.tracers import Tracer
from isoshard.torch_bridge.engine.values.value import Storage, Value

from .memory_log import MemoryLog
from .recipes import Recipe
from .recorder import Recorder, materialize, recorder, replace


class Immediate(Recorder):
    """Runs operations at once.

    Args:
        keys: an iterator of PRNG keys for random operations, or None if there are none.
        imports: CPU tensors among the operands are constants, and no mistake.
    """

    __slots__ = ("imports", "keys")

    def __init__(self, keys: Any = None, *, imports: bool = False):
        """See the class."""
        super().__init__()
        self.keys = keys
        self.imports = imports
        self.opened = True

    def take_over(self, around: Recorder) -> None:
        """As any recorder; a function of JAX's does not read memory of the step around it."""
        super().take_over(around)
        if self.imports and self.capture is not None and not isinstance(self.log, _OwnMemory):
            self.log = _OwnMemory(around)

    def record(
        self, recipe: Recipe, inputs: Sequence[Value], scalars: Sequence[Any] = ()
    ) -> list[Value]:
        """Compute an operation on arrays or tracers."""
        for value in inputs:
            if value.array is None:
                materialize([value])
        key = None
        if recipe.random:
            if self.keys is None:
                raise RuntimeError(
                    f"{recipe.name} draws random numbers, but this function was traced without a "
                    "key: pass rng=jax.random.key(seed) when you call it, or use .eval()"
                )
            key = next(self.keys)
        with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
            arrays = [jnp.asarray(value.array) for value in inputs]
            lifted = [jnp.asarray(scalar, jnp.float64) for scalar in scalars]
            return [Value.handed(array) for array in recipe.run(arrays, lifted, key)]

    def check_handing_out(self) -> None:
        """What is computed at once is JAX's already."""

    def view(self, base: Value, chain: Any) -> None:
        """Nothing is remembered: a traced value must not outlive its trace."""

    def keep_view(self, base: Value, chain: Any, view: Value) -> None:
        """See `view`."""


class _OwnMemory(MemoryLog):
    """Refuses memory that a captured step gives, by its arrays, to what JAX computes at once."""

    def touch(self, storage: Storage) -> None:
        """Refuse what was made before."""
        if id(storage) not in self.created:
            self.tape.check_handing_out()


class immediately:
    """Context in which operations run at once on arrays or tracers."""

    def __init__(self, keys: Any = None, *, imports: bool = False):
        """See `Immediate`."""
        self._new = Immediate(keys, imports=imports)

    def __enter__(self) -> None:
        """Switch."""
        self._new.take_over(recorder())
        self._old = replace(self._new)

    def __exit__(self, *exc: object) -> None:
        """Switch back."""
        replace(self._old)


def takes_constants() -> bool:
    """Whether `jax_function` runs torch code on this thread: JAX differentiates what it does."""
    return recorder().imports


def is_tracing() -> bool:
    """Whether operations run at once, on tracers."""
    return isinstance(recorder(), Immediate) or isinstance(jnp.zeros(()), Tracer)
