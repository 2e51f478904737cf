"""Gradients summed over several batches, as one loop of the compiled program.

>>> import torch, isoshard.torch_bridge
>>> model = torch.nn.Linear(3, 1).to("jax")
>>> batches = torch.ones(4, 8, 3, device="jax")              # four batches of eight
>>> loss = accumulate(lambda x: model(x).mean(), (batches,), model)
>>> model.weight.grad
tensor([[1., 1., 1.]], device='jax:0')

It is the same as this Python loop, which would record every batch:

```
for x in batches:
    loss = model(x).mean() / len(batches)
    loss.backward()
```
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from isoshard.core.repeats.jaxpr_functions import strong
from isoshard.core.runtime.caches import PROGRAMS, Interned
from isoshard.torch_bridge.common import naming
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.recording import tape as tapes
from isoshard.torch_bridge.engine.recording.tape import Recipe
from isoshard.torch_bridge.engine.subprograms.closed_over import ClosedOver
from isoshard.torch_bridge.engine.subprograms.scan_loop import captured_slots
from isoshard.torch_bridge.engine.subprograms.subprogram import Subprogram, extract
from isoshard.torch_bridge.engine.subprograms.traced_vjp import CapturedInput, TracedVjp, aval_of
from isoshard.torch_bridge.engine.values.value import Aval


def accumulate(
    train_step: Callable[..., Any],
    batches: Sequence[torch.Tensor],
    model: torch.nn.Module,
    *carried: torch.Tensor,
) -> Any:
    """Run a training step for each batch, and add the gradients up.

    The step's Python code runs once. Each batch counts `1 / number of batches`, so the gradients
    are those of the mean loss. Buffers that the step writes to (BatchNorm statistics) get their new
    values, and each batch draws random numbers of its own.

    Args:
        train_step: `(*batch, *carried) -> loss`, or `-> (loss, *carried)` if anything is carried.
        batches: tensors on the `jax` device; the leading axis of each goes over the batches.
        model: its parameters get the gradients, in addition to those they have.
        *carried: tensors that go from one batch to the next.

    Returns:
        The mean loss, and behind it the carried tensors as the last batch left them.

    Raises:
        ValueError: the batches are none, empty, no tensors, or of different numbers; or the loss
            does not depend on the model's parameters.
        TypeError: a carried tensor changes its shape or dtype.
    """
    count = _check(batches, carried)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    width = len(batches)
    inputs = [
        CapturedInput(Aval.contiguous(tuple(batch.shape[1:]), batch.dtype), False)
        for batch in batches
    ]
    inputs += [CapturedInput(aval_of(value), False) for value in carried]

    def code(tensors: list[Any]) -> Sequence[Any]:
        result = train_step(*tensors[:width], *tensors[width:])
        loss, *rest = result if isinstance(result, tuple | list) else (result,)
        _check_result(loss, rest, carried)
        return [loss / count, *[value.detach() for value in rest]]

    with torch.enable_grad():
        run = TracedVjp(code, inputs, "the training step", may_collect=True)
    originals = [original for original, _ in run.subtrace.aliases]
    positions = {id(original): index for index, original in enumerate(originals)}
    trained = [parameter for parameter in parameters if id(parameter) in positions]
    if not run.differentiable or not trained:
        raise ValueError(
            "the loss of the training step does not depend on a parameter of the model that "
            "requires a gradient"
        )
    loop = _loop_of(run, width, count, tuple([positions[id(value)] for value in trained]))
    closed = ClosedOver.of(run, differentiable=True)
    operands: list[Any] = [value.detach() for value in (*batches, *carried, *closed.tensors())]
    values = [lazy_tensor.read(value) for value in operands]
    del operands
    floats = closed.floats(loop.shape.body)
    entries = iter(tapes.recorder().record(loop.recipe, values, floats))
    del values
    results = [lazy_tensor.fresh(aval, next(entries)) for aval in loop.results]
    gradients = [lazy_tensor.fresh(aval_of(value), next(entries)) for value in trained]
    with torch.no_grad():
        closed.write(entries)
    with torch.enable_grad():
        _Gradients.apply(gradients, *trained).backward()
    return results[0] if not carried else tuple(results)


class _Gradients(torch.autograd.Function):
    """A scalar with given gradients: torch adds them to `.grad`, and calls the hooks."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Any], *parameters: Any) -> Any:
        ctx.gradients = gradients
        return torch.zeros((), device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return (None, *ctx.gradients)


@dataclasses.dataclass(frozen=True)
class _LoopKey:
    """The key of a loop, see `_Loop`.

    Attributes:
        count: how many batches there are.
        widths: how many tensors go over the batches, and how many are carried.
        written: indices of the tensors from around that the step writes to.
        body: takes a batch, what is carried, what is written, the rest from around, and the loss's
            gradient; gives the loss, what is carried, gradients, and what is written.
        results: the avals of the loss and of what is carried.
        gradients: the avals of the gradients.
    """

    count: int
    widths: tuple[int, int]
    written: tuple[int, ...]
    body: Subprogram
    results: tuple[Aval, ...]
    gradients: tuple[Aval, ...]


class _Loop:
    """The loop over the batches as a recipe."""

    def __init__(self, shape: _LoopKey):
        self.shape = shape
        self.results = shape.results
        self.recipe = Recipe(
            f"gradients of {shape.count} batches",
            self._run,
            len(shape.results) + len(shape.gradients) + len(shape.written),
            random=bool(shape.body.draws),
            lifted=len(shape.body.scalars),
        )

    def _run(self, arrays: Sequence[Any], scalars: Any, key: Any) -> list[Any]:
        shape = self.shape
        batches, carried = shape.widths
        slices, start = list(arrays[:batches]), list(arrays[batches : batches + carried])
        around = arrays[batches + carried :]
        written = [around[index] for index in shape.written]
        rest = [array for index, array in enumerate(around) if index not in shape.written]
        keys = jax.random.split(key, shape.count) if shape.body.draws else None
        unit = jnp.ones(*shape.results[0].token)

        def body(state: Any, now: Any) -> Any:
            sums, carried, written = state
            batch, key = now
            out = shape.body.run([*batch, *carried, *written, *rest, unit], scalars, key)
            loss, *out = map(strong, out)
            new, out = out[: len(carried)], out[len(carried) :]
            grads, now_written = out[: len(sums) - 1], out[len(sums) - 1 :]
            added = [
                total + gradient.astype(total.dtype)
                for total, gradient in zip(sums, [loss, *grads], strict=True)
            ]
            return (added, new, now_written), None

        zeros = [jnp.zeros(*aval.token) for aval in (shape.results[0], *shape.gradients)]
        (sums, last, written), _ = jax.lax.scan(
            body, (zeros, start, written), (slices, keys), shape.count
        )
        return [sums[0], *last, *sums[1:], *written]


def _loop_of(run: TracedVjp, batches: int, count: int, trained: Sequence[int]) -> _Loop:
    subtrace = run.subtrace
    around, written, rest = captured_slots(run)
    slots = [*run.inputs, *(around[index] for index in written), *rest]
    gradients = []
    for index in trained:
        slot = run.gradients[len(run.inputs) + index]
        assert slot is not None
        gradients.append(slot)
    ends = [*run.results, *gradients, *(slot for _, slot in run.written)]
    shape = _LoopKey(
        count,
        (batches, len(run.inputs) - batches),
        written,
        extract(subtrace, [*slots, *run.cotangents], ends),
        tuple(run.avals),
        tuple([aval_of(subtrace.aliases[index][0]) for index in trained]),
    )
    loop = _LOOPS.lookup(shape)
    if loop is None:
        loop = _LOOPS.intern(shape, _Loop(shape))
    return loop


_LOOPS: Interned[_LoopKey, _Loop] = Interned(PROGRAMS, "accumulate_gradients: loops")


def _check(batches: Sequence[Any], carried: Sequence[Any]) -> int:
    if not batches:
        raise ValueError("gradient accumulation needs at least one tensor of batches")
    for index, batch in enumerate(batches):
        if not isinstance(batch, torch.Tensor):
            raise ValueError(f"batches[{index}] is no tensor, but {type(batch).__name__}")
        if batch.dim() == 0 or batch.numel() == 0:
            raise ValueError(
                f"batches[{index}] of shape {tuple(batch.shape)} is empty or has no leading axis"
            )
    counts = [batch.shape[0] for batch in batches]
    if len(set(counts)) > 1:
        raise ValueError(f"the leading axes of the batches have different lengths: {counts}")
    for kind_of_tensor, group in (("batches", batches), ("carried", carried)):
        for index, batch in enumerate(group):
            if not isinstance(batch, lazy_tensor.LazyTensor):
                kind = f"on {batch.device}" if isinstance(batch, torch.Tensor) else repr(batch)
                raise ValueError(
                    f"gradient accumulation takes tensors on the {naming.current().type} "
                    f"device, and {kind_of_tensor}[{index}] "
                    f"is {kind}; move it with {naming.moving()}"
                )
    return counts[0]


def _check_result(loss: Any, rest: Sequence[Any], carried: Sequence[Any]) -> None:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise ValueError("the training step must return a loss of one element, first")
    if len(rest) != len(carried):
        raise ValueError(
            f"the training step must return the loss and the {len(carried)} carried tensors, and "
            f"returned {len(rest)} besides the loss"
        )
    for index, (new, old) in enumerate(zip(rest, carried, strict=True)):
        if new.shape != old.shape or new.dtype != old.dtype:
            raise TypeError(
                f"the training step must keep shapes and dtypes: carried[{index}] is "
                f"{tuple(old.shape)} {old.dtype}, the new one {tuple(new.shape)} {new.dtype}"
            )
