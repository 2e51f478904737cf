"""A loop over torch code while JAX traces: `jax.lax.scan`, which JAX differentiates.

Inside `jax_function` the code of each step runs on tracers, as all other code does there. So what a
`torch.autograd.Function` says of its gradient holds in the loop as it does outside of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.recording import tape as tapes
from isoshard.torch_bridge.engine.recording.memory_log import MemoryLog, noted_in
from isoshard.torch_bridge.engine.recording.recorder import materialize, recorder
from isoshard.torch_bridge.engine.subprograms.closed_over import whole
from isoshard.torch_bridge.engine.subprograms.scan_loop import stacked, strong
from isoshard.torch_bridge.engine.subprograms.traced_vjp import CapturedInput, aval_of
from isoshard.torch_bridge.engine.values.value import Storage, Value

Code = Callable[[list[Any]], Sequence[Any]]


class Traced:
    """Code of a loop's step that runs on tracers.

    Args:
        code: takes carries and slices, and returns carries and results.
        inputs: what stands for each of those it takes.

    Attributes:
        is_for_jax: nothing wants torch's autograd.
    """

    def __init__(self, code: Code, inputs: Sequence[CapturedInput]):
        """Run it once, on shapes, which finds what it writes to from around."""
        self._code, self._inputs = code, inputs
        self._draws, self.is_for_jax = False, True
        self._written: list[Storage] = []
        shapes = [jax.ShapeDtypeStruct(*one.aval.token) for one in inputs]
        with jax.enable_x64(True):  # the code's tensors may have 64 bits, whatever JAX has
            jax.eval_shape(self._attempt, shapes)

    def scan(
        self, given: Sequence[Any], length: int, *, recompute: bool
    ) -> list[lazy_tensor.LazyTensor]:
        """The last carries, and the results of all steps, stacked.

        Args:
            given: the first carries, and what the loop scans over.
            length: how many steps there are.
            recompute: recompute for the gradient what a step does.
        """
        carries = sum(one.carried for one in self._inputs)
        before = [lazy_tensor.read(whole(storage)) for storage in self._written]
        arrays, held = _arrays(map(lazy_tensor.read, given)), _arrays(before)
        keys = jax.random.split(next(_keys_here()), length) if self._draws else None
        results: list[Any] = []

        def body(state: Any, now: Any) -> Any:
            (carry, held), (slices, key) = state, now
            folded = (
                None if key is None else (jax.random.fold_in(key, n) for n in itertools.count())
            )
            self._hold(map(Value.handed, held))
            results[:] = self._run([*carry, *slices], folded)
            found = [lazy_tensor.read(one).array for one in results]
            held = [storage.value.array for storage in self._written]
            with jax.enable_x64(True):  # the code's tensors may have 64 bits, whatever JAX has
                return ([*map(strong, found[:carries])], [*map(strong, held)]), found[carries:]

        step = jax.checkpoint(body) if recompute else body
        start = (arrays[:carries], held)
        try:
            (last, held), stacks = jax.lax.scan(step, start, (arrays[carries:], keys), length)
        finally:
            self._hold(before)
        for storage, array in zip(self._written, held, strict=True):
            lazy_tensor.write(whole(storage), Value.handed(array))
        avals = [aval_of(one) for one in results]
        avals[carries:] = [stacked(one, length) for one in avals[carries:]]
        return [
            lazy_tensor.fresh(aval, Value.handed(array))
            for aval, array in zip(avals, [*last, *stacks], strict=True)
        ]

    def _run(self, arrays: Sequence[Any], keys: Any) -> list[Any]:
        tensors = [
            lazy_tensor.fresh(one.aval, Value.handed(array))
            for one, array in zip(self._inputs, arrays, strict=True)
        ]
        with tapes.immediately(keys, imports=tapes.takes_constants()):
            return list(self._code(tensors))

    def _hold(self, values: Iterable[Value]) -> None:
        """Let what is written to hold these values."""
        for storage, value in zip(self._written, values, strict=True):
            storage.value = value

    def _attempt(self, arrays: Sequence[Any]) -> list[Any]:
        log = MemoryLog(tapes.Tape())
        drawn: list[bool] = []

        def probe() -> Iterator[jax.Array]:
            while True:
                drawn.append(True)
                yield jax.random.key(0)

        with noted_in(log):
            results = self._run(arrays, probe())
        for key, (storage, first) in log.storages.items():
            if key not in log.created and storage.value is not first:
                self._written.append(storage)
                storage.value = first
        self._draws = bool(drawn)
        self.is_for_jax = not any(one.requires_grad for one in results)
        return [lazy_tensor.read(one).array for one in results]


def _arrays(values: Iterable[Value]) -> list[jax.Array]:
    """Arrays as Python code on tracers sees them: those of 64 bits stay so."""
    values = list(values)
    materialize(values)
    with jax.enable_x64(True):
        return [jnp.asarray(value.array) for value in values]


def is_traced() -> bool:
    """Whether torch code runs on tracers here."""
    return isinstance(recorder(), tapes.Immediate)


def _keys_here() -> Iterator[jax.Array]:
    keys: Any = recorder()
    if keys.keys is None:
        raise RuntimeError(
            "a loop draws random numbers, but this function was traced without a key: pass "
            "rng=jax.random.key(seed) when you call it, or use .eval()"
        )
    return keys.keys
