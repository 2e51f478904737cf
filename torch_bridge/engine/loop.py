"""Many identical layers as one `jax.lax.scan`, differentiated by torch.

The layer's Python code runs once, on tensors that hold tracers. For the backward loop torch's own
autograd is asked, not JAX's: what torch saves for backward in that one run becomes the loop's
stacked residuals, and the same autograd graph, with residuals in place of the saved tensors, is
the body of the loop that runs backwards. So gradients are torch's formulas, as without the loop.

Inputs come in three groups: *carried* from layer to layer, *shared* by all layers, and each layer's
*own* parameters and buffers, which are stacked inside the program.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.extend.core import jaxpr_as_fun

from isoshard.torch_bridge.dtypes import logical_dtype

from . import base
from . import tape as tapes
from .log import Log, noted_in
from .residuals import Residuals
from .tape import Recipe
from .value import Aval, Value

Tensors = list[base.LazyTensor]
Layer = Callable[[Tensors, Tensors, Tensors], Tensors]
"""A layer's code: `(carried, shared, own) -> carried`, all flat."""


@dataclasses.dataclass(frozen=True)
class Input:
    """One input of a layer.

    Attributes:
        aval: its size, stride and dtype.
        wanted: whether its gradient is wanted.
    """

    aval: Aval
    wanted: bool


class Loop:
    """The forward and the backward loop over layers with inputs like these.

    Args:
        layer: the code of a layer, run in torch's present modes (autocast, training).
        count: how many layers there are.
        carried: what each layer takes from the one before.
        shared: what all of them take.
        own: parameters and buffers of one layer.
        again: run each layer again in the backward loop, instead of keeping what it computed.
        stacked: the own inputs of all layers come stacked, and so do their gradients.

    Attributes:
        forward: takes carried, shared, and the own inputs of the first layer, the second, ..; gives
            carried, residuals, and for each written own input its new value in every layer.
        residuals: what the forward loop keeps for the backward loop.
        written: numbers of the own inputs that a layer writes to.
        backward: takes the gradients of what was carried out and is `floating`, shared, own inputs
            as `forward`, and residuals; gives the gradients of what was carried in and is
            `floating`, of shared inputs that want one, and for each own input that wants one its
            gradient in every layer. None if no gradient is wanted.
        floating: numbers of the carried inputs that have gradients.
        copies: how often each own input comes: once if stacked, or once for every layer.

    Raises:
        TypeError: the layer does not return what it takes.
        ValueError: it uses a tensor that is none of its inputs, or writes to a shared one.
    """

    def __init__(
        self,
        layer: Layer,
        count: int,
        carried: Sequence[Input],
        shared: Sequence[Input],
        own: Sequence[Input],
        *,
        again: bool = False,
        stacked: bool = False,
    ):
        """Trace both loops."""
        self._layer, self._count, self._again = layer, count, again
        self._is_stacked, self.copies = stacked, 1 if stacked else count
        self.carried, self.shared, self.own = carried, shared, own
        self.floating = [
            n for n, one in enumerate(carried) if one.aval.meta.dtype.is_floating_point
        ]
        self._wants = any(one.wanted for one in (*carried, *shared, *own))
        self._run: Any = None  # a `_Run`, while the loops are traced
        self.written: list[int] = []
        self.residuals: list[Aval] = []
        # A step that is being captured touches none of these tensors.
        with noted_in(None), jax.numpy_dtype_promotion("standard"):
            self._random = self._draws_numbers()
            self.forward = self._trace_forward()
            self.backward = self._trace_backward() if self._wants else None
        del self._layer, self._run

    def _draws_numbers(self) -> bool:
        """Whether the layer draws random numbers, by trying it."""
        drawn: list[bool] = []

        def keys():
            while True:
                drawn.append(True)
                yield jax.random.key(0)

        def attempt(carried: Any, shared: Any, own: Any) -> None:
            self._call(carried, shared, own, keys(), wants=False)

        jax.eval_shape(attempt, _shapes(self.carried), _shapes(self.shared), _shapes(self.own))
        return bool(drawn)

    def _call(self, carried: Any, shared: Any, own: Any, keys: Any, *, wants: bool) -> _Run:
        """Run the layer's code once."""
        run = _Run(_tensors(self.carried, carried), _tensors(self.shared, shared))
        run.own = _tensors(self.own, own)
        for number in self.floating if wants else ():
            run.carried[number].requires_grad_()
        for one, tensor in zip((*self.shared, *self.own), (*run.shared, *run.own), strict=True):
            if wants and one.wanted:
                tensor.requires_grad_()
        run.saved = Residuals({"shared": shared, "own": own})
        log = Log(tapes.Tape())
        with noted_in(log), tapes.immediately(keys), torch.set_grad_enabled(wants):
            with run.saved.hooks() if wants else contextlib.nullcontext():
                # Clones, because a layer may write to what it takes.
                given: Any = [tensor.clone() for tensor in run.carried]
                run.results = self._layer(given, run.shared, run.own)
            run.arrays = [base.read(result).array for result in run.results]
        self._check(run, log, shared)
        self.written = [
            number
            for number, (tensor, array) in enumerate(zip(run.own, own, strict=True))
            if tensor._storage.value.array is not array
        ]
        return run

    def _check(self, run: _Run, log: Log, shared: Sequence[Any]) -> None:
        wanted = [one.aval for one in self.carried]
        found = [result._aval for result in run.results]
        if [aval.token for aval in wanted] != [aval.token for aval in found]:
            raise TypeError(
                "a scanned layer must return what it takes, for the next layer to take it; this "
                f"one takes {_text(wanted)} and returns {_text(found)}. Choose what is handed on "
                "with scan_layers(layers, call=lambda layer, x, *args: layer(x, *args)[0])."
            )
        mine = {id(t._storage) for t in (*run.carried, *run.shared, *run.own)}
        outside = [
            storage.aval
            for key, (storage, _) in log.storages.items()
            if key not in log.created and key not in mine
        ]
        if outside:
            raise ValueError(
                f"a scanned layer uses tensors that are none of its parameters, buffers or "
                f"arguments: {_text(outside)}. Pass them as arguments: they are shared by all "
                "layers."
            )
        for tensor, array in zip(run.shared, shared, strict=True):
            if tensor._storage.value.array is not array:
                raise ValueError(
                    f"a scanned layer writes to an argument that all layers share "
                    f"({_text([tensor._aval])}); write to a copy"
                )

    def _trace_forward(self) -> Recipe:
        widths = (len(self.carried), len(self.shared))

        def forward(flat: Sequence[Any], key: Any) -> list[Any]:
            carried, shared, own = _split(flat, *widths)
            stacks = self._stacked(own, range(len(self.own)))
            keys = jax.random.split(key, self._count) if self._random else None

            def body(carry, layer):
                own, key = layer
                wants = self._wants and not self._again
                self._run = run = self._call(carry, shared, own, _keys(key), wants=wants)
                kept = run.saved.arrays if wants else []
                if self._wants and self._again:
                    kept = [*carry, *([] if key is None else [jax.random.key_data(key)])]
                new = [run.own[number]._storage.value.array for number in self.written]
                return _strong(run.arrays), (list(kept), new)

            last, (kept, new) = jax.lax.scan(body, list(carried), (stacks, keys), self._count)
            self.residuals = [_aval_of(array) for array in kept]
            return [*last, *kept, *self._apart(new)]

        own = self._own_shapes()
        flat = [*_shapes(self.carried), *_shapes(self.shared), *own]
        key = jax.eval_shape(lambda: jax.random.key(0)) if self._random else None
        traced = jaxpr_as_fun(jax.make_jaxpr(forward)(flat, key))

        def run(arrays: Any, _scalars: Any, key: Any) -> Any:
            return traced(*arrays, *([key] if self._random else []))

        count = len(self.carried) + len(self.residuals) + len(self.written) * self.copies
        name = f"scan over {self._count} layers"
        return Recipe(name, run, count, random=self._random)

    def _trace_backward(self) -> Recipe:
        """The loop that runs backwards; see the class for what it takes and gives."""
        widths = (len(self.floating), len(self.shared), self.copies * len(self.own))
        shared_wanted = [n for n, one in enumerate(self.shared) if one.wanted]
        own_wanted = [n for n, one in enumerate(self.own) if one.wanted]
        used = range(len(self.own)) if self._again else sorted(self._run.saved.used("own"))

        def backward(flat: Sequence[Any]) -> list[Any]:
            grads, shared, own, kept = _split(flat, *widths)
            sums = [jnp.zeros_like(shared[number]) for number in shared_wanted]

            def body(carry, layer):
                grads, sums = carry
                own, kept = dict(zip(used, layer[0], strict=True)), layer[1]
                run = self._run_again(shared, own, kept) if self._again else self._run
                if not self._again:
                    run.saved.provide({"shared": shared, "own": own, "residual": kept})
                inputs = [run.carried[number] for number in self.floating]
                inputs += [run.shared[number] for number in shared_wanted]
                inputs += [run.own[number] for number in own_wanted]
                found = self._gradients(run, inputs, grads)
                mine, rest = found[: len(grads)], found[len(grads) :]
                added = [a + b for a, b in zip(sums, rest[: len(sums)], strict=True)]
                return (mine, added), rest[len(sums) :]

            stacks = self._stacked(own, used)
            start = (list(grads), sums)
            (grads, sums), mine = jax.lax.scan(
                body, start, (stacks, list(kept)), self._count, reverse=True
            )
            return [*grads, *sums, *self._apart(mine)]

        flat = _shapes([self.carried[number] for number in self.floating])
        flat += _shapes(self.shared) + self._own_shapes()
        flat += [jax.ShapeDtypeStruct(*aval.token) for aval in self.residuals]
        traced = jaxpr_as_fun(jax.make_jaxpr(backward)(flat))
        count = len(self.floating) + len(shared_wanted) + len(own_wanted) * self.copies
        name = f"backward scan over {self._count} layers"
        return Recipe(name, lambda arrays, _scalars, _key: traced(*arrays), count)

    def _run_again(self, shared: Any, own: dict[int, Any], kept: Sequence[Any]) -> _Run:
        key = jax.random.wrap_key_data(kept[-1]) if self._random else None
        carried = kept[: len(self.carried)]
        return self._call(carried, shared, list(own.values()), _keys(key), wants=True)

    def _gradients(self, run: _Run, inputs: Tensors, grads: Sequence[Any]) -> list[Any]:
        """One layer's gradients, by torch."""
        pairs = [
            (run.results[number], base.fresh(self.carried[number].aval, Value(grad)))
            for number, grad in zip(self.floating, grads, strict=True)
            if run.results[number].requires_grad
        ]
        found: Any = [None] * len(inputs)
        with tapes.immediately(), _without_autocast():
            if pairs:
                found = torch.autograd.grad(
                    [result for result, _ in pairs],
                    inputs,
                    [grad for _, grad in pairs],
                    retain_graph=True,
                    allow_unused=True,
                )
            return [
                jnp.zeros(*one._aval.token)
                if grad is None
                else jax.lax.convert_element_type(base.read(grad).array, one._aval.physical)
                for one, grad in zip(inputs, found, strict=True)
            ]

    def _own_shapes(self) -> list[jax.ShapeDtypeStruct]:
        shapes = _shapes(self.own)
        if not self._is_stacked:
            return shapes * self._count
        return [jax.ShapeDtypeStruct((self._count, *one.shape), one.dtype) for one in shapes]

    def _apart(self, stacks: Sequence[Any]) -> list[Any]:
        """What the layers get, of results that the loop stacked."""
        return list(stacks) if self._is_stacked else [layer for stack in stacks for layer in stack]

    def _stacked(self, own: Sequence[Any], numbers: Any) -> list[jax.Array]:
        if self._is_stacked:
            return [own[number] for number in numbers]
        width = len(self.own)
        return [jnp.stack([own[at + n] for at in range(0, len(own), width)]) for n in numbers]


class _Run:
    """One run of a layer's code: its tensors, its results, and what autograd saved."""

    own: Tensors
    saved: Residuals
    results: Tensors
    arrays: list[Any]

    def __init__(self, carried: Tensors, shared: Tensors):
        self.carried = carried
        self.shared = shared


def _tensors(inputs: Sequence[Input], arrays: Sequence[Any]) -> Tensors:
    return [base.fresh(one.aval, Value.handed(a)) for one, a in zip(inputs, arrays, strict=True)]


def _shapes(inputs: Sequence[Input]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(*one.aval.token) for one in inputs]


def _split(flat: Sequence[Any], *widths: int) -> list[Sequence[Any]]:
    """Consecutive pieces of these lengths, and the rest."""
    ends = [0, *itertools.accumulate(widths), len(flat)]
    return [flat[start:end] for start, end in itertools.pairwise(ends)]


def _strong(arrays: Sequence[Any]) -> list[jax.Array]:
    """Without JAX's weak types, which a loop may not carry."""
    return [jax.lax.convert_element_type(array, array.dtype) for array in arrays]


def _aval_of(array: Any) -> Aval:
    return Aval.contiguous(tuple(array.shape), logical_dtype(array.dtype))


def _keys(key: Any) -> Any:
    return None if key is None else (jax.random.fold_in(key, n) for n in itertools.count())


def _without_autocast() -> contextlib.AbstractContextManager[Any]:
    if torch.is_autocast_enabled("jax"):
        return torch.autocast("jax", enabled=False)
    return contextlib.nullcontext()


def _text(avals: Sequence[Aval]) -> str:
    return ", ".join(f"{tuple(aval.meta.size)} {aval.meta.dtype}" for aval in avals)
