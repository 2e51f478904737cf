"""A loop over torch code while JAX traces: `jax.lax.scan`, which JAX differentiates.

Inside `jax_function` the code of each step runs on tracers, as all other code does there. So what a
`torch.autograd.Function` says of its gradient holds in the loop as it does outside of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.recording import tape as tapes
from isoshard.torch_bridge.engine.recording.memory_log import MemoryLog, noted_in
from isoshard.torch_bridge.engine.recording.recorder import recorder
from isoshard.torch_bridge.engine.subprograms.traced_vjp import CapturedInput, aval_of
from isoshard.torch_bridge.engine.values.value import Aval, Value

Code = Callable[[list[Any]], Sequence[Any]]


class Traced:
    """Code of a loop's step that runs on tracers.

    Args:
        code: takes carries and slices, and returns carries and results.
        inputs: what stands for each of those it takes.
    """

    def __init__(self, code: Code, inputs: Sequence[CapturedInput]):
        """Run it once, on shapes."""
        self._code, self._inputs = code, inputs
        self._draws = self._is_apart = False
        shapes = [jax.ShapeDtypeStruct(*one.aval.token) for one in inputs]
        jax.eval_shape(self._attempt, shapes)

    @property
    def is_apart(self) -> bool:
        """Whether it writes to nothing from before, and nothing wants torch's autograd."""
        return self._is_apart

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
        arrays = [lazy_tensor.read(tensor).array for tensor in given]
        keys = jax.random.split(next(_keys_here()), length) if self._draws else None
        results: list[Any] = []

        def body(carry: Any, now: Any) -> Any:
            slices, key = now
            folded = (
                None if key is None else (jax.random.fold_in(key, n) for n in itertools.count())
            )
            results[:] = self._run([*carry, *slices], folded)
            found = [lazy_tensor.read(one).array for one in results]
            strong = [jax.lax.convert_element_type(one, one.dtype) for one in found[:carries]]
            return strong, found[carries:]

        step = jax.checkpoint(body) if recompute else body  # pyright: ignore[reportPrivateImportUsage]
        last, stacks = jax.lax.scan(step, arrays[:carries], (arrays[carries:], keys), length)
        avals = [aval_of(one) for one in results]
        avals[carries:] = [
            Aval.contiguous((length, *one.meta.size), one.meta.dtype) for one in avals[carries:]
        ]
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

    def _attempt(self, arrays: Sequence[Any]) -> list[Any]:
        log = MemoryLog(tapes.Tape())
        drawn: list[bool] = []

        def probe() -> Iterator[jax.Array]:
            while True:
                drawn.append(True)
                yield jax.random.key(0)

        with noted_in(log):
            results = self._run(arrays, probe())
        written = [
            (storage, first)
            for key, (storage, first) in log.storages.items()
            if key not in log.created and storage.value is not first
        ]
        for storage, first in written:
            storage.value = first
        self._draws = bool(drawn)
        self._is_apart = not written and not any(one.requires_grad for one in results)
        return [lazy_tensor.read(one).array for one in results]


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
