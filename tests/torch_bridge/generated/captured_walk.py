"""Runs groups of calls in a captured step, and finds those that a replay does not repeat."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard.torch_xla_bridge.torch_xla.experimental.assume_pure import assume_pure

from .tensor_calls import KINDS, RANDOM, Call

NUMBERS = (1, 2, 3)
SIZE = 64
"""Calls in a step."""


class Stop(Exception):
    """Ends a step that needs not be computed."""


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where the tensor of a call comes from.

    Attributes:
        given: makes an argument of the step from a tensor on the device.
        within: makes the call's tensor from the argument, in the step.
    """

    given: Callable[[torch.Tensor], torch.Tensor]
    within: Callable[[torch.Tensor], torch.Tensor]


def _read(x: torch.Tensor) -> torch.Tensor:
    x.tolist()
    return x


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


ORIGINS = {
    "held": Origin(_read, _same),
    "lazy": Origin(lambda x: x.clone(), _same),
    "computed": Origin(_read, lambda x: x.clone()),
}


def step_of(calls: Sequence[Call], origin: str, inner: Callable[..., Any], stops: bool) -> Any:
    """A step that makes each call with an argument of its own, and returns all results.

    Args:
        calls: to make.
        origin: a key of `ORIGINS`.
        inner: calls a function, as `torch.utils.checkpoint.checkpoint` does.
        stops: whether the step ends by `Stop`.
    """
    within = ORIGINS[origin].within

    def step_907(*given_907: Any) -> Any:
        found_907 = []
        for call_907, one_907 in zip(calls, given_907, strict=True):
            tensor_907 = within(one_907)
            found_907.append((inner(call_907.run, tensor_907), tensor_907))
        if stops:
            raise Stop
        return found_907

    return step_907


def arguments(calls: Sequence[Call], origin: str, number: float) -> list[torch.Tensor]:
    """The tensors that a step is given."""
    return [ORIGINS[origin].given(KINDS[call.kind](number).to("jax")) for call in calls]


REFUSALS = (xs.CaptureError, iso.ShardingError)
REFUSALS_OF_DYNAMO = (
    *REFUSALS,
    torch._dynamo.exc.TorchDynamoException,  # with the operation, of what dynamo cannot trace
    jax.errors.ConcretizationTypeError,  # of a value that is read in a graph, with the line
    RuntimeError,
)
"""What a first call may raise instead of giving a result."""


def _plain(run: Callable[[Any], Any], x: Any) -> Any:
    return run(x)


def _pure(run: Callable[[Any], Any], x: Any) -> Any:
    return assume_pure(run)(x)


def _checkpointed(run: Callable[[Any], Any], x: Any) -> Any:
    return checkpoint(run, x, use_reentrant=False)


WAYS: dict[str, tuple[Callable[[Any], Any], Callable[..., Any]]] = {
    "compile": (xs.compile, _plain),
    "repeat": (lambda step: xs.compile(step, repeat="auto"), _plain),
    "checkpoint": (xs.compile, _checkpointed),
    "assume_pure": (xs.compile, _pure),
    "torch.compile": (lambda step: torch.compile(step, backend="isoshard"), _plain),
}
"""By name: what compiles a step, and what calls a function in it."""


def values(result: Any) -> Any:
    """The values of a result, copied, without the tensors and arrays that have them."""
    if isinstance(result, torch.Tensor):
        if result.is_meta:
            return "meta", tuple(result.shape)
        found = result.detach().cpu().resolve_conj().resolve_neg()
        if found.dtype == torch.bfloat16:
            return ["bfloat16", values(found.float())]
        return found.numpy().copy()
    if isinstance(result, jax.Array | np.ndarray):
        return np.array(result)
    if isinstance(result, dict):
        return {key: values(one) for key, one in result.items()}
    if isinstance(result, list | tuple):
        return [values(one) for one in result]
    if isinstance(result, bool | int | float | complex | str | bytes | type(None)):
        return result
    if isinstance(result, type | torch.dtype | torch.device | torch.layout):
        return repr(result)
    if hasattr(result, "data") and hasattr(result, "indices"):  # a shard
        return [values(result.data), repr(result.indices)]
    if hasattr(result, "data") and hasattr(result, "index"):
        return [values(result.data), repr(result.index)]
    return type(result).__name__


def equal(found: Any, wanted: Any) -> bool:
    """Whether two results of `values` are equal."""
    if isinstance(wanted, np.ndarray):
        return (
            isinstance(found, np.ndarray)
            and found.dtype == wanted.dtype
            and found.shape == wanted.shape
            and np.allclose(found, wanted, 1e-5, 1e-5, equal_nan=True)
        )
    if type(found) is not type(wanted):
        return False
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(
            equal(found[key], one) for key, one in wanted.items()
        )
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(equal, found, wanted))
    if isinstance(wanted, float):
        return bool(np.isclose(found, wanted, 1e-5, 1e-5, equal_nan=True))
    return found == wanted


def outcome(call: Call, result: Any, given: torch.Tensor) -> Any:
    """The values of a call's result, and of its argument afterwards.

    Args:
        call: was made.
        result: of the step.
        given: the argument of the step.
    """
    state = given, given.grad, given.requires_grad, given.is_leaf
    found = values([result, state])
    return _shapes(found) if call.name in RANDOM else found


def _shapes(found: Any) -> Any:
    if isinstance(found, list):
        return [_shapes(one) for one in found]
    return list(found.shape) if isinstance(found, np.ndarray) else found


def references(
    calls: Sequence[Call], origin: str, inner: Callable[..., Any] = _plain
) -> tuple[dict[str, Any], dict[str, Exception]]:
    """What each call gives without `compile`, for each number; and those that raise.

    Args:
        calls: to make.
        origin: a key of `ORIGINS`.
        inner: as for `step_of`.
    """
    found, raised, recorded = {}, {}, []
    for call in calls:  # alone, and without a look at the result: nothing is compiled
        try:
            step_of([call], origin, inner, False)(*arguments([call], origin, 1))
        except Exception as error:
            raised[call.name] = error
        else:
            recorded.append(call)
    for at in range(0, len(recorded), SIZE):
        try:
            found |= _results(recorded[at : at + SIZE], origin, inner)
        except Exception:
            for call in recorded[at : at + SIZE]:
                try:
                    found |= _results([call], origin, inner)
                except Exception as error:
                    raised[call.name] = error
    return found, raised


def _results(calls: Sequence[Call], origin: str, inner: Callable[..., Any]) -> dict[str, Any]:
    found: dict[str, Any] = {call.name: [] for call in calls}
    step = step_of(calls, origin, inner, False)
    for number in NUMBERS:
        given = arguments(calls, origin, number)
        results = step(*given)
        xs.sync()
        for call, one, its in zip(calls, results, given, strict=True):
            found[call.name].append(outcome(call, one, its))
    return found


@dataclasses.dataclass
class Walk:
    """What became of calls in one way.

    Attributes:
        way: a key of `WAYS`.
        origin: a key of `ORIGINS`.
        wanted: by name of a call, what it gives without `compile`.
        replayed: calls that are right when they are replayed.
        not_replayed: those that are right, and not replayed, or captured in each call.
        refused: those that raise one of `REFUSALS`, with the message.
        faults: what else came of a call.
    """

    way: str
    origin: str
    wanted: dict[str, Any]
    replayed: list[str] = dataclasses.field(default_factory=list)
    not_replayed: list[str] = dataclasses.field(default_factory=list)
    refused: dict[str, str] = dataclasses.field(default_factory=dict)
    faults: dict[str, Any] = dataclasses.field(default_factory=dict)

    def run(self, calls: Sequence[Call]) -> None:
        """Make each call."""
        alone = [call for call in calls if self._goes_through(call)]
        for at in range(0, len(alone), SIZE):
            self._group(alone[at : at + SIZE])

    def _goes_through(self, call: Call) -> bool:
        """Whether a call can be recorded; nothing is compiled for that."""
        if self.way == "torch.compile":
            return True
        wrap, inner = WAYS[self.way]
        step = wrap(step_of([call], self.origin, inner, True))
        try:
            step(*arguments([call], self.origin, 1))
        except Stop:
            return True
        except Exception as error:
            self._note(call, error)
        return False

    def _note(self, call: Call, error: Exception) -> None:
        """Sort an error."""
        allowed = REFUSALS_OF_DYNAMO if self.way == "torch.compile" else REFUSALS
        by_dynamo = self.way == "torch.compile" and "from user code:" in str(error)
        if isinstance(error, allowed) or by_dynamo:  # its own assertions, with the line
            self.refused[call.name] = str(error)
            return
        alike = references([call], self.origin, WAYS[self.way][1])[1]
        if type(alike.get(call.name)) is type(error):
            self.refused[call.name] = f"without compile as well: {error}"
        else:
            self.faults[call.name] = error

    def _group(self, calls: Sequence[Call]) -> None:
        if not calls:
            return
        wrap, inner = WAYS[self.way]
        step = wrap(step_of(calls, self.origin, inner, False))
        before = iso.metrics.counters()
        wrong: dict[str, Any] = {}
        try:
            for at, number in enumerate(NUMBERS):
                given = arguments(calls, self.origin, number)
                for call, one, its in zip(calls, step(*given), given, strict=True):
                    want = self.wanted[call.name][at]
                    if call.name not in wrong and not equal(got := outcome(call, one, its), want):
                        wrong[call.name] = number, got, want
        except Exception as error:
            if len(calls) > 1:
                return self._halves(calls)
            return self._note(calls[0], error)
        after = iso.metrics.counters()
        if self.way != "torch.compile" and (
            after["calls_without_replay"] > before["calls_without_replay"]
            or after["captures"] > before["captures"] + 1
        ):
            if len(calls) > 1:
                return self._halves(calls)
            if not wrong:
                self.not_replayed.append(calls[0].name)
        self.faults |= wrong
        self.replayed += [call.name for call in calls if call.name not in wrong]
        return None

    def _halves(self, calls: Sequence[Call]) -> None:
        half = len(calls) // 2
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._group(calls[:half])
            self._group(calls[half:])
