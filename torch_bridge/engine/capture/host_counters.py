"""CPU work inside a captured step: the step counters of optimizers.

`torch.optim` keeps each parameter's step count in a CPU tensor, adds one to it and computes bias
corrections from its value in Python. While a step is captured, a dispatch mode notes such
operations, so that they can be repeated before each replay, and hands out symbols for the numbers
read.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

import torch

from isoshard.core.errors import CaptureError
from isoshard.core.runtime import metrics
from isoshard.torch_bridge._torch_internals import TorchDispatchMode, pytree, schema_of
from isoshard.torch_bridge._torch_internals.dispatcher import open_dispatches
from isoshard.torch_bridge._torch_internals.tensor_fields import is_view
from isoshard.torch_bridge._torch_internals.undocumented import is_anomaly_enabled
from isoshard.torch_bridge.common import naming
from isoshard.torch_bridge.engine.operators import dispatch
from isoshard.torch_bridge.engine.recording.deferred_checks import Fault
from isoshard.torch_bridge.engine.values.expressions import Listed
from isoshard.torch_bridge.engine.values.symbolic_numbers import Table

from .guards import equal
from .repeated import Ref, Repeated
from .unnoted import Unnoted


class HostOps(TorchDispatchMode):
    """Notes operations on CPU tensors, and repeats them.

    Args:
        table: where the numbers read become symbols.
        known: tensors that the step can reach, by id, and their names.

    Attributes:
        refused: the last value of a `jax` tensor that the step asked for in vain, or None.
        operands: by the id of a value on the device, the value, and what gives the CPU tensor that
            it is a copy of.
        deferred: numbers that the step's program computes, and what is checked of each.
        reasons: why repeating the operations would not do what the step did.
    """

    supports_higher_order_operators = True  # `torch.cond` and others, which pass as all do

    def __init__(self, table: Table, known: Mapping[int, tuple[torch.Tensor, str]]):
        """See the class."""
        super().__init__()
        self._known = known
        self._is_aside = False
        self.table = table
        self.refused: CaptureError | None = None
        self.ops: list[tuple[Any, Any, Any]] = []
        self.results: list[Any] = []
        self._made: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        self._numbers: dict[int, Ref] = {}
        self._read: dict[int, torch.SymFloat] = {}  # since the last operation that is no read
        self._fresh: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._constants: dict[int, torch.Tensor] = {}
        self.operands: dict[int, tuple[Any, Callable[[], torch.Tensor]]] = {}
        self.deferred: list[tuple[Any, Fault]] = []
        self.reasons: list[str] = []
        self._arranged: Repeated | None = None
        self._changing: list[tuple[torch.Tensor, torch.Tensor]] = []

    def refuse(self, what: str) -> None:
        """Refuse what a replay could not give, and remember that it was asked for.

        Raises:
            CaptureError: always.
        """
        self.refused = CaptureError(
            f"{metrics.user_location()}: a compiled step needs {what} in the middle of the step, "
            "which a replay could not repeat. Return the tensor from the step and read it outside "
            f"(for a Python branch, use torch.where).{_ANOMALY * is_anomaly_enabled()}"
        )
        raise self.refused

    def refuse_upload(self, tensor: torch.Tensor) -> None:
        """Refuse a CPU tensor that comes from outside the step, but for a single number.

        Raises:
            CaptureError: it is such a tensor.
        """
        if tensor.dim() and not self.made_here(tensor):
            raise CaptureError(
                f"{metrics.user_location()}: a compiled step moves {self.name_of(tensor)} to the "
                "jax device, which is not one of its arguments; a replay would move all of it "
                "again in every call. Move it before the step and pass it as an argument."
            )

    def name_of(self, tensor: torch.Tensor) -> str:
        """A CPU tensor for messages."""
        text = f"a CPU tensor of shape {tuple(tensor.shape)}"
        found, name = self._known.get(id(tensor), (None, ""))
        return f"{name}, {text}," if found is tensor else text

    def made_here(self, tensor: torch.Tensor) -> bool:
        """Whether a CPU tensor was computed inside the step."""
        return self._made.get(id(tensor)) is tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note an operation whose tensors are all on the CPU; let others pass."""
        with Unnoted() as unnoted:
            if self._is_aside:
                return func(*args, **(kwargs or {}))
            return self._seen(unnoted, func, types, args, kwargs or {})

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Let operations pass that are not the step's."""
        self._is_aside = True
        try:
            yield
        finally:
            self._is_aside = False

    def _seen(self, unnoted: Unnoted, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if any(map(_is_on_device, args)):  # soon seen for most
            if not open_dispatches() and dispatch.is_only_recorded(func, types):
                return func(*args, **kwargs)
            return unnoted.call(func, args, kwargs)
        tensors = [
            leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        ]
        if any(type(tensor) not in _PLAIN for tensor in tensors):
            return unnoted.call(func, args, kwargs)
        if (
            any(
                isinstance(leaf, torch.SymFloat | torch.SymInt)
                for leaf in pytree.tree_leaves((args, kwargs))
            )
            and tensors
        ):
            raise CaptureError(
                f"{metrics.user_location()}: a compiled step computes {func} on a CPU tensor with "
                "a number that changes from step to step; keep such arithmetic on Python numbers "
                "or on jax tensors (an optimizer does with capturable=True)"
            )
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()) and not _elsewhere(
            kwargs
        ):
            raise CaptureError(
                f"{metrics.user_location()}: a compiled step draws random numbers on the CPU "
                f"({func}), which a replay would not draw anew; draw them on the "
                f"{naming.current().type} device "
                "(device='jax'), or pass them as an argument"
            )
        result = unnoted.call(func, args, kwargs)
        if not tensors or tensors[0].device.type != "cpu":
            self._note_made(result)
            return result
        return self._note(func, args, kwargs, result)

    def _note_made(self, result: Any, *, views: bool = False) -> None:
        """Note tensors that an operation made; whether they view what it was given."""
        for leaf in pytree.tree_leaves(result):
            if type(leaf) in _PLAIN:
                self._made[id(leaf)] = leaf
                if not views:
                    self._fresh.append((leaf, leaf.clone()))

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        def mark(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor) and id(leaf) in self._numbers:
                return self._numbers[id(leaf)]
            return leaf

        if func is torch.ops.aten.lift_fresh.default:  # torch.tensor(..): made just now
            self._note_made(result)
            self._constants[id(result)] = result
            return result
        reads = func is torch.ops.aten._local_scalar_dense.default and isinstance(result, float)
        if reads and id(args[0]) in self._read:
            symbol = self._read[id(args[0])]
            if equal(symbol.node.value, result):
                return symbol
        given = {id(leaf) for leaf in pytree.tree_leaves((args, kwargs))}
        for key in given:
            self._constants.pop(key, None)  # the operation may write to it
        number = len(self.ops)
        self.ops.append((func, pytree.tree_map(mark, args), pytree.tree_map(mark, kwargs)))
        self.results.append(result)
        several = isinstance(result, list | tuple)
        views = any(one.alias_info for one in schema_of(func).returns)
        for place, one in enumerate(result if several else [result]):
            if isinstance(one, torch.Tensor) and id(one) not in given:
                self._numbers[id(one)] = Ref(number, place if several else None)
                self._note_made(one, views=views)
        if reads:
            symbol = self._read[id(args[0])] = self.table.symbol(
                Listed(self.results, number), result
            )
            return symbol
        self._read.clear()  # the operation may have written to it
        if not isinstance(result, torch.Tensor) and _has_values(result):
            self.reasons.append(
                f"{metrics.user_location()} reads {result!r} from a tensor on the CPU ({func})"
            )
        return result

    def operand(
        self, value: Any, tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Let a replay take an operand from the CPU anew.

        Args:
            value: what it is on the device.
            tensor: the tensor on the CPU.
            change: what was done to it before it went to the device.
        """
        if id(tensor) in self._constants:
            return
        number = len(self.ops)
        self._note(torch.ops.aten.clone.default, (tensor,), {}, tensor.detach().clone())
        self.operands[id(value)] = (value, lambda: change(self.results[number]))

    def kept(self, tensors: Container[int]) -> bool:
        """Whether a tensor made inside the step is among those with these ids."""
        return any(id(tensor) in tensors for tensor, _ in self._fresh)

    def end(self) -> None:
        """Forget the graph behind what the step made on the CPU, with the `jax` tensors in it.

        An autograd function may give such a tensor: the one of `torch.utils.checkpoint` does before
        torch 2.13.
        """
        for tensor, _ in self._fresh:
            if tensor.grad_fn is not None and not is_view(tensor):
                tensor.detach_()
        self.results[:] = pytree.tree_map(_without_graph, self.results)

    def restart(self) -> None:
        """Give the tensors made inside the step the values they were made with."""
        _copy_back(self._fresh)

    def repeat(self) -> None:
        """Run the noted operations again, on the tensors' present values."""
        if self._arranged is None or self._arranged.count != len(self.ops):
            self._arranged = Repeated(self.ops, self.results)
            self._changing = [one for one in self._fresh if self._arranged.may_write(one[0])]
        if self._changing:
            _copy_back(self._changing)
        self._arranged.run()


def _copy_back(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with torch.no_grad():
        for tensor, first in pairs:
            tensor.copy_(first)


def _without_graph(result: Any) -> Any:
    if isinstance(result, torch.Tensor) and result.grad_fn is not None:
        return result.detach()
    return result


def _is_on_device(argument: Any) -> bool:
    """Whether an argument is a tensor that is not on the CPU, or a list that begins with one."""
    if type(argument) is list and argument:
        argument = argument[0]
    return isinstance(argument, torch.Tensor) and type(argument) not in _PLAIN


def _elsewhere(kwargs: Any) -> bool:
    device = kwargs.get("device")
    return device is not None and torch.device(device).type != "cpu"


def _has_values(result: Any) -> bool:
    """Whether an operation gave numbers to Python."""
    return any(isinstance(leaf, bool | int | float) for leaf in pytree.tree_leaves(result))


_ANOMALY = (
    " With anomaly detection on, torch reads every gradient: switch it off, or call the step "
    "function without compile meanwhile."
)
_PLAIN = (torch.Tensor, torch.nn.Parameter)
