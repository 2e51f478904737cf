"""CPU operations inside a captured step: the step counts of optimizers.

`torch.optim` keeps each parameter's step count in a CPU tensor, adds one to it and computes bias
corrections from its value in Python. While a step is captured, a dispatch mode records such
operations, repeats them before each replay, and returns symbols for the floats that are read.

Through torch, adding one to a count and reading it take a microsecond together, which is most of
what a replay of AdamW takes besides its program. `StepCounts` does both in memory in a tenth of
that, with the same bits:

>>> counts = StepCounts([torch.tensor(3.0), torch.tensor(4.0)])
>>> add, read = counts.adding([0, 1], 1), counts.reading([0, 1])
>>> add()
>>> read()
[4.0, 5.0]
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from isoshard.core.errors import CaptureError
from isoshard.core.runtime import metrics
from isoshard.core.runtime.scattered import Scattered
from isoshard.torch_bridge import naming
from isoshard.torch_bridge._torch_internals import TorchDispatchMode, pytree, schema_of
from isoshard.torch_bridge._torch_internals.dispatcher import open_dispatches
from isoshard.torch_bridge._torch_internals.tensor_fields import is_view
from isoshard.torch_bridge._torch_internals.undocumented import is_anomaly_enabled
from isoshard.torch_bridge.engine.operators import dispatch
from isoshard.torch_bridge.engine.operators.functionalize import written
from isoshard.torch_bridge.engine.recording.deferred_checks import Fault
from isoshard.torch_bridge.engine.values.expressions import Listed
from isoshard.torch_bridge.engine.values.symbolic_numbers import Table

from .executed_code import Unnoted
from .guards import equal

_NUMPY: dict[torch.dtype, Any] = {torch.float32: np.float32, torch.float64: np.float64}


def is_count(tensor: Any) -> bool:
    """Whether a tensor is one that `StepCounts` takes: one number on the CPU, without autograd."""
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.dtype in _NUMPY
        and tensor.dim() == 0
        and not (tensor.requires_grad or tensor.is_inference() or tensor.is_neg())
        and tensor.data_ptr() != 0
        and tensor.data_ptr() % tensor.element_size() == 0
    )


def is_increment(number: Any, tensor: torch.Tensor) -> bool:
    """Whether a number is added to a count as Python adds it.

    Args:
        number: a Python number, or a CPU tensor with one.
        tensor: the count.
    """
    if isinstance(number, torch.Tensor):
        return is_count(number) and number.dtype == tensor.dtype
    return type(number) in (int, float)


class StepCounts:
    """The memory of CPU tensors.

    Args:
        tensors: `is_count` of each.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]):
        """See the class."""
        self.tensors = list(tensors)
        self._addresses = list(map(_ADDRESS, self.tensors))
        self._dtypes = list(map(_DTYPE, self.tensors))

    def are_in_place(self) -> bool:
        """Whether the tensors have the memory that they had, and one number each."""
        return (
            list(map(_ADDRESS, self.tensors)) == self._addresses
            and list(map(_DTYPE, self.tensors)) == self._dtypes
            and not any(map(_DIM, self.tensors))
        )

    def adding(self, places: Sequence[int], number: float) -> Callable[[], None]:
        """A function that adds a number, rounded to their dtype first, to some.

        Args:
            places: which, each once, of one dtype.
            number: `is_increment` of each.
        """
        rounded = torch.tensor([number], dtype=self._dtypes[places[0]], device="cpu").numpy()
        return self._adding(places, lambda: rounded)

    def adding_one(self, places: Sequence[int], other: int) -> Callable[[], None]:
        """A function that adds one of the tensors, as it is then, to others of the same dtype.

        Args:
            places: to which, each once.
            other: which is added; none of these.
        """
        return self._adding(places, self._cells([other]).read)

    def _adding(
        self, places: Sequence[int], number: Callable[[], np.ndarray]
    ) -> Callable[[], None]:
        cells, tensors = self._cells(places), [self.tensors[place] for place in places]
        note = torch.autograd.graph.increment_version

        def add() -> None:
            with np.errstate(over="ignore"):  # infinite, as in torch
                cells.write(cells.read() + number())
            note(tensors)

        return add

    def reading(self, places: Sequence[int]) -> Callable[[], list[Any]]:
        """A function that gives the present numbers of some."""
        if len({self._dtypes[place] for place in places}) > 1:
            each = [self.reading([place]) for place in places]
            return lambda: [read()[0] for read in each]
        cells = self._cells(places)
        return lambda: cells.read().tolist()

    def _cells(self, places: Sequence[int]) -> Scattered:
        addresses = [self._addresses[place] for place in places]
        return Scattered(addresses, _NUMPY[self._dtypes[places[0]]])


_ADDRESS = torch.Tensor.data_ptr
_DTYPE = operator.attrgetter("dtype")
_DIM = torch.Tensor.dim


@dataclasses.dataclass(frozen=True)
class Ref:
    """A tensor computed by an earlier operation.

    Attributes:
        number: of the operation.
        place: among its results, where it gives several.
    """

    number: int
    place: int | None = None


@dataclasses.dataclass
class _Run:
    """Operations of one kind that follow each other.

    Attributes:
        through_torch: runs them, whatever their tensors are.
        in_memory: runs them on the step counts that they had when they were arranged, or None.
    """

    through_torch: Callable[[], None]
    in_memory: Callable[[], None] | None = None


class Repeated:
    """Operations in the order in which they are run.

    Args:
        ops: `(func, args, kwargs)`.
        results: what they gave; replaced in each run.

    Attributes:
        count: how many there are.
    """

    def __init__(self, ops: Sequence[tuple[Any, Any, Any]], results: list[Any]):
        """See the class."""
        self.count = len(ops)
        self._ops = list(ops)
        self._results = results
        self._refers = [_has_ref((args, kwargs)) for _, args, kwargs in ops]
        self._arrange()

    def run(self) -> None:
        """Run them on the tensors' present values."""
        in_place = None
        for run in self._runs:
            if run.in_memory is None:
                run.through_torch()
                in_place = None  # it may have moved some
                continue
            in_place = self._counts.are_in_place() if in_place is None else in_place
            (run.in_memory if in_place else run.through_torch)()
        if in_place is False:
            self._arrange()

    def may_write(self, tensor: torch.Tensor) -> bool:
        """Whether an operation writes to a tensor, or to what may be a view of it."""
        targets = pytree.tree_leaves([_written(op) for op in self._ops])
        return any(one is tensor or isinstance(one, Ref) for one in targets)

    def _arrange(self) -> None:
        """Find the step counts, and the reads that follow each other."""
        taken = itertools.chain.from_iterable(_read(op) or _taken(op) for op in self._ops)
        counts = {id(one): one for one in taken if is_count(one)}
        self._counts = StepCounts(list(counts.values()))
        self._places = {key: place for place, key in enumerate(counts)}
        self._runs: list[_Run] = []
        reads = itertools.groupby(range(self.count), lambda number: bool(_read(self._ops[number])))
        for are_reads, numbers in reads:
            self._runs += [self._reads([*numbers])] if are_reads else map(self._other, numbers)

    def _reads(self, numbers: Sequence[int]) -> _Run:
        """Several reads."""
        marks = [_read(self._ops[number])[0] for number in numbers]
        where = slice(numbers[0], numbers[-1] + 1)

        def through_torch() -> None:
            self._results[where] = [self._real(mark).item() for mark in marks]

        if any(id(mark) not in self._places for mark in marks):
            return _Run(through_torch)
        read = self._counts.reading([self._places[id(mark)] for mark in marks])

        def in_memory() -> None:
            self._results[where] = read()

        return _Run(through_torch, in_memory)

    def _other(self, number: int) -> _Run:
        """An addition to step counts, or any operation."""
        through_torch = functools.partial(self._run_one, number)
        tensors, added = _added(self._ops[number])
        counted = all(
            id(one) in self._places and one is not added and is_increment(added, one)
            for one in tensors
        )
        twice = len({id(one) for one in tensors}) < len(tensors)
        if not tensors or twice or not counted or len({one.dtype for one in tensors}) > 1:
            return _Run(through_torch)
        if self._ops[number][0] is torch.ops.aten.add_.Tensor:
            self._results[number] = tensors[0]
        places = [self._places[id(one)] for one in tensors]
        if isinstance(added, torch.Tensor):
            other = self._places[id(added)]
            return _Run(through_torch, self._counts.adding_one(places, other))
        return _Run(through_torch, self._counts.adding(places, added))

    def _run_one(self, number: int) -> None:
        func, args, kwargs = self._ops[number]
        if self._refers[number]:
            args, kwargs = pytree.tree_map(self._real, (args, kwargs))
        self._results[number] = func(*args, **kwargs)

    def _real(self, leaf: Any) -> Any:
        if not isinstance(leaf, Ref):
            return leaf
        result = self._results[leaf.number]
        return result if leaf.place is None else result[leaf.place]


def _read(op: tuple[Any, Any, Any]) -> tuple[Any, ...]:
    """What an operation reads, if that is all it does."""
    func, args, kwargs = op
    reads = func is torch.ops.aten._local_scalar_dense.default and len(args) == 1 and not kwargs
    return args if reads else ()


def _added(op: tuple[Any, Any, Any]) -> tuple[Sequence[Any], Any]:
    """The tensors to which an operation adds one number, and the number."""
    func, args, kwargs = op
    if kwargs.get("alpha", 1) != 1 or len(args) != 2:
        return (), None
    if func is torch.ops.aten.add_.Tensor:
        return args[:1], args[1]
    together = torch.ops.aten._foreach_add_
    return args if func in (together.Scalar, together.Tensor) else ((), None)


def _taken(op: tuple[Any, Any, Any]) -> list[Any]:
    """What an addition to step counts takes."""
    tensors, number = _added(op)
    return [*tensors, number]


def _written(op: tuple[Any, Any, Any]) -> list[Any]:
    """What an operation writes to."""
    func, args, kwargs = op
    arguments = schema_of(func).arguments
    given = dict(zip((one.name for one in arguments), args, strict=False)) | kwargs
    return [given[name] for name in written(arguments) if name in given]


def _has_ref(args: Any) -> bool:
    return any(isinstance(leaf, Ref) for leaf in pytree.tree_leaves(args))


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
