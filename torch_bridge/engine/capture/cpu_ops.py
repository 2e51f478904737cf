"""CPU operations inside a captured step: the step counts of optimizers.

`torch.optim` keeps each parameter's step count in a CPU tensor, adds one to it and computes bias
corrections from its value in Python. While a step is captured, a dispatch mode records such
operations, repeats them before each replay, and returns symbols for the floats that are read.

Through torch, adding one to a count and reading it take a microsecond together, which is most of
what a replay of AdamW takes besides its program. `StepCounts` does both in memory in a tenth of
that, with the same bits:

>>> counts = StepCounts([torch.tensor(3.0), torch.tensor(4.0)])
>>> add, read = counts.adder([0, 1], 1), counts.reader([0, 1])
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
from isoshard.torch_bridge._torch_internals import TorchDispatchMode, pytree, schema_of
from isoshard.torch_bridge._torch_internals.dispatcher import open_dispatches
from isoshard.torch_bridge._torch_internals.tensor_fields import is_view
from isoshard.torch_bridge._torch_internals.undocumented import is_anomaly_enabled
from isoshard.torch_bridge.common import naming
from isoshard.torch_bridge.engine.operators import dispatch
from isoshard.torch_bridge.engine.operators.functionalize import written
from isoshard.torch_bridge.engine.recording.deferred_checks import CountCheck
from isoshard.torch_bridge.engine.values.expressions import Listed
from isoshard.torch_bridge.engine.values.symbolic_numbers import Table

from .executed_code import SkippedFrames
from .guards import equal

_NUMPY: dict[torch.dtype, Any] = {torch.float32: np.float32, torch.float64: np.float64}


def is_count(tensor: Any) -> bool:
    """Whether a tensor is a scalar on the CPU without autograd, as `StepCounts` takes."""
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


def is_increment(addend: Any, tensor: torch.Tensor) -> bool:
    """Whether `StepCounts` adds a Python number or a CPU scalar to a count with torch's bits."""
    if isinstance(addend, torch.Tensor):
        return is_count(addend) and addend.dtype == tensor.dtype
    return type(addend) in (int, float)


class StepCounts:
    """Scalars in the memory of CPU tensors, for which `is_count` holds."""

    def __init__(self, tensors: Sequence[torch.Tensor]):
        """See the class."""
        self.tensors = list(tensors)
        self._addresses = list(map(_ADDRESS, self.tensors))
        self._dtypes = list(map(_DTYPE, self.tensors))

    def are_unmoved(self) -> bool:
        """Whether the addresses, dtypes and shapes of the tensors are unchanged."""
        return (
            list(map(_ADDRESS, self.tensors)) == self._addresses
            and list(map(_DTYPE, self.tensors)) == self._dtypes
            and not any(map(_DIM, self.tensors))
        )

    def adder(self, positions: Sequence[int], addend: float) -> Callable[[], None]:
        """A function that adds a number, rounded to their dtype first, to some counts."""
        rounded = torch.tensor([addend], dtype=self._dtypes[positions[0]], device="cpu").numpy()
        return self._adder(positions, lambda: rounded)

    def count_adder(self, positions: Sequence[int], addend: int) -> Callable[[], None]:
        """A function that adds the current value of one count to others of the same dtype."""
        return self._adder(positions, self._memory([addend]).read)

    def _adder(
        self, positions: Sequence[int], read_addend: Callable[[], np.ndarray]
    ) -> Callable[[], None]:
        memory, tensors = (
            self._memory(positions),
            [self.tensors[position] for position in positions],
        )
        increment_version = torch.autograd.graph.increment_version

        def add() -> None:
            with np.errstate(over="ignore"):  # infinite, as in torch
                memory.write(memory.read() + read_addend())
            increment_version(tensors)

        return add

    def reader(self, positions: Sequence[int]) -> Callable[[], list[Any]]:
        """A function that returns the current values of some counts."""
        if len({self._dtypes[position] for position in positions}) > 1:
            readers = [self.reader([position]) for position in positions]
            return lambda: [read()[0] for read in readers]
        memory = self._memory(positions)
        return lambda: memory.read().tolist()

    def _memory(self, positions: Sequence[int]) -> Scattered:
        addresses = [self._addresses[position] for position in positions]
        return Scattered(addresses, _NUMPY[self._dtypes[positions[0]]])


_ADDRESS = torch.Tensor.data_ptr
_DTYPE = operator.attrgetter("dtype")
_DIM = torch.Tensor.dim


@dataclasses.dataclass(frozen=True)
class OpResult:
    """A result of an earlier operation.

    Attributes:
        index: of the operation.
        position: in the list of its results, if it returns several.
    """

    index: int
    position: int | None = None


@dataclasses.dataclass
class _OpGroup:
    """Consecutive operations of one kind.

    Attributes:
        through_torch: runs them through torch.
        in_memory: runs them on step counts in memory, or None.
    """

    through_torch: Callable[[], None]
    in_memory: Callable[[], None] | None = None


class ReplayedOps:
    """Operations that each replay runs again, in order.

    Args:
        ops: `(func, args, kwargs)`.
        results: their results; replaced in each run.

    Attributes:
        count: the number of operations.
    """

    def __init__(self, ops: Sequence[tuple[Any, Any, Any]], results: list[Any]):
        """See the class."""
        self.count = len(ops)
        self._ops = list(ops)
        self._results = results
        self._takes_results = [_has_op_result((args, kwargs)) for _, args, kwargs in ops]
        self._group()

    def run(self) -> None:
        """Run them on the current values."""
        unmoved = None
        for group in self._groups:
            if group.in_memory is None:
                group.through_torch()
                unmoved = None  # it may have moved some
                continue
            unmoved = self._counts.are_unmoved() if unmoved is None else unmoved
            (group.in_memory if unmoved else group.through_torch)()
        if unmoved is False:
            self._group()

    def may_write(self, tensor: torch.Tensor) -> bool:
        """Whether an operation writes to a tensor, or to a result that may be a view of it."""
        targets = pytree.tree_leaves([_written(op) for op in self._ops])
        return any(target is tensor or isinstance(target, OpResult) for target in targets)

    def _group(self) -> None:
        """Find the step counts, and group consecutive reads."""
        operands = itertools.chain.from_iterable(_read(op) or _operands(op) for op in self._ops)
        counts = {id(operand): operand for operand in operands if is_count(operand)}
        self._counts = StepCounts(list(counts.values()))
        self._positions = {key: position for position, key in enumerate(counts)}
        self._groups: list[_OpGroup] = []
        reads = itertools.groupby(range(self.count), lambda index: bool(_read(self._ops[index])))
        for are_reads, indices in reads:
            self._groups += (
                [self._read_group([*indices])] if are_reads else map(self._other_group, indices)
            )

    def _read_group(self, indices: Sequence[int]) -> _OpGroup:
        """A group of reads."""
        operands = [_read(self._ops[index])[0] for index in indices]
        span = slice(indices[0], indices[-1] + 1)

        def through_torch() -> None:
            self._results[span] = [self._resolved(operand).item() for operand in operands]

        if any(id(operand) not in self._positions for operand in operands):
            return _OpGroup(through_torch)
        read = self._counts.reader([self._positions[id(operand)] for operand in operands])

        def in_memory() -> None:
            self._results[span] = read()

        return _OpGroup(through_torch, in_memory)

    def _other_group(self, index: int) -> _OpGroup:
        """A group of one addition to step counts, or of any other operation."""
        through_torch = functools.partial(self._run_op, index)
        tensors, added = _added(self._ops[index])
        are_counts = all(
            id(tensor) in self._positions and tensor is not added and is_increment(added, tensor)
            for tensor in tensors
        )
        repeated = len({id(tensor) for tensor in tensors}) < len(tensors)
        if (
            not tensors
            or repeated
            or not are_counts
            or len({tensor.dtype for tensor in tensors}) > 1
        ):
            return _OpGroup(through_torch)
        if self._ops[index][0] is torch.ops.aten.add_.Tensor:
            self._results[index] = tensors[0]
        positions = [self._positions[id(tensor)] for tensor in tensors]
        if isinstance(added, torch.Tensor):
            other = self._positions[id(added)]
            return _OpGroup(through_torch, self._counts.count_adder(positions, other))
        return _OpGroup(through_torch, self._counts.adder(positions, added))

    def _run_op(self, index: int) -> None:
        func, args, kwargs = self._ops[index]
        if self._takes_results[index]:
            args, kwargs = pytree.tree_map(self._resolved, (args, kwargs))
        self._results[index] = func(*args, **kwargs)

    def _resolved(self, leaf: Any) -> Any:
        if not isinstance(leaf, OpResult):
            return leaf
        result = self._results[leaf.index]
        return result if leaf.position is None else result[leaf.position]


def _read(op: tuple[Any, Any, Any]) -> tuple[Any, ...]:
    """The operand of an operation that reads a scalar; else empty."""
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
    foreach_add = torch.ops.aten._foreach_add_
    return args if func in (foreach_add.Scalar, foreach_add.Tensor) else ((), None)


def _operands(op: tuple[Any, Any, Any]) -> list[Any]:
    """The operands of an addition to step counts."""
    tensors, added = _added(op)
    return [*tensors, added]


def _written(op: tuple[Any, Any, Any]) -> list[Any]:
    """The operands that an operation writes to."""
    func, args, kwargs = op
    arguments = schema_of(func).arguments
    operands = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
    return [operands[name] for name in written(arguments) if name in operands]


def _has_op_result(args: Any) -> bool:
    return any(isinstance(leaf, OpResult) for leaf in pytree.tree_leaves(args))


class CpuOps(TorchDispatchMode):
    """Records operations on CPU tensors, and replays them.

    Args:
        table: the expressions of the step; floats that are read become symbols of it.
        reachable: tensors that the step can reach, by id, and their expressions.

    Attributes:
        error: the last error for reading a value of a `jax` tensor, or None.
        operands: by the id of a value on the device, the value, and a function that returns the CPU
            tensor that it is a copy of.
        deferred: results of the step's program that are checked later, and the check of each.
        reasons: why a replay of the operations is not equivalent.
    """

    supports_higher_order_operators = True  # `torch.cond` and others, which pass as all do

    def __init__(self, table: Table, reachable: Mapping[int, tuple[torch.Tensor, str]]):
        """See the class."""
        super().__init__()
        self._reachable = reachable
        self._is_paused = False
        self.table = table
        self.error: CaptureError | None = None
        self.ops: list[tuple[Any, Any, Any]] = []
        self.results: list[Any] = []
        self._created: weakref.WeakValueDictionary[int, torch.Tensor] = (
            weakref.WeakValueDictionary()
        )
        self._op_results: dict[int, OpResult] = {}
        self._read: dict[int, torch.SymFloat] = {}  # since the last operation that is not a read
        self._initial: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._constants: dict[int, torch.Tensor] = {}
        self.operands: dict[int, tuple[Any, Callable[[], torch.Tensor]]] = {}
        self.deferred: list[tuple[Any, CountCheck]] = []
        self.reasons: list[str] = []
        self._replayed: ReplayedOps | None = None
        self._reset: list[tuple[torch.Tensor, torch.Tensor]] = []

    def refuse(self, what: str) -> None:
        """Raise for a value that a replay cannot provide, and store the error.

        Raises:
            CaptureError: always.
        """
        self.error = CaptureError(
            f"{metrics.user_location()}: a compiled step needs {what} in the middle of the step, "
            "which a replay could not repeat. Return the tensor from the step and read it outside, "
            "or print it in each run with isoshard.torch_bridge.print('{}', tensor); for a Python "
            f"branch, use torch.where.{_ANOMALY * is_anomaly_enabled()}"
        )
        raise self.error

    def refuse_upload(self, tensor: torch.Tensor) -> None:
        """Raise for a CPU tensor from outside the step, unless it is a scalar.

        Raises:
            CaptureError: for such a tensor.
        """
        if tensor.dim() and not self.is_created(tensor):
            raise CaptureError(
                f"{metrics.user_location()}: a compiled step moves {self._describe(tensor)} to the "
                "jax device, which is not one of its arguments; a replay would move all of it "
                "again in every call. Move it before the step and pass it as an argument."
            )

    def _describe(self, tensor: torch.Tensor) -> str:
        """A CPU tensor for messages."""
        text = f"a CPU tensor of shape {tuple(tensor.shape)}"
        reachable, name = self._reachable.get(id(tensor), (None, ""))
        return f"{name}, {text}," if reachable is tensor else text

    def is_created(self, tensor: torch.Tensor) -> bool:
        """Whether a CPU tensor was computed inside the step."""
        return self._created.get(id(tensor)) is tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record an operation whose tensors are all on the CPU; dispatch others."""
        with SkippedFrames() as skipped:
            if self._is_paused:
                return func(*args, **(kwargs or {}))
            return self._dispatch(skipped, func, types, args, kwargs or {})

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Context in which nothing is recorded: its operations are not the step's."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def _dispatch(
        self, skipped: SkippedFrames, func: Any, types: Any, args: Any, kwargs: Any
    ) -> Any:
        if any(map(_is_on_device, args)):  # true of most
            if not open_dispatches() and dispatch.is_only_recorded(func, types):
                return func(*args, **kwargs)
            return skipped.call(func, args, kwargs)
        tensors = [
            leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        ]
        if any(type(tensor) not in _PLAIN for tensor in tensors):
            return skipped.call(func, args, kwargs)
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
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()) and not _on_other_device(
            kwargs
        ):
            raise CaptureError(
                f"{metrics.user_location()}: a compiled step draws random numbers on the CPU "
                f"({func}), which a replay would not draw anew; draw them on the "
                f"{naming.current().type} device "
                "(device='jax'), or pass them as an argument"
            )
        result = skipped.call(func, args, kwargs)
        if not tensors or tensors[0].device.type != "cpu":
            self._record_created(result)
            return result
        return self._record(func, args, kwargs, result)

    def _record_created(self, result: Any, *, views: bool = False) -> None:
        """Record tensors that an operation created, or views of its operands."""
        for leaf in pytree.tree_leaves(result):
            if type(leaf) in _PLAIN:
                self._created[id(leaf)] = leaf
                if not views:
                    self._initial.append((leaf, leaf.clone()))

    def _record(self, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        def reference(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor) and id(leaf) in self._op_results:
                return self._op_results[id(leaf)]
            return leaf

        if func is torch.ops.aten.lift_fresh.default:  # torch.tensor(..): created by this line
            self._record_created(result)
            self._constants[id(result)] = result
            return result
        reads = func is torch.ops.aten._local_scalar_dense.default and isinstance(result, float)
        if reads and id(args[0]) in self._read:
            symbol = self._read[id(args[0])]
            if equal(symbol.node.value, result):
                return symbol
        operand_ids = {id(leaf) for leaf in pytree.tree_leaves((args, kwargs))}
        for key in operand_ids:
            self._constants.pop(key, None)  # the operation may write to it
        index = len(self.ops)
        self.ops.append(
            (func, pytree.tree_map(reference, args), pytree.tree_map(reference, kwargs))
        )
        self.results.append(result)
        several = isinstance(result, list | tuple)
        views = any(leaf.alias_info for leaf in schema_of(func).returns)
        for position, leaf in enumerate(result if several else [result]):
            if isinstance(leaf, torch.Tensor) and id(leaf) not in operand_ids:
                self._op_results[id(leaf)] = OpResult(index, position if several else None)
                self._record_created(leaf, views=views)
        if reads:
            symbol = self._read[id(args[0])] = self.table.symbol(
                Listed(self.results, index), result
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
        """Let each replay upload an operand from the CPU."""
        if id(tensor) in self._constants:
            return
        index = len(self.ops)
        self._record(torch.ops.aten.clone.default, (tensor,), {}, tensor.detach().clone())
        self.operands[id(value)] = (value, lambda: change(self.results[index]))

    def keeps(self, tensors: Container[int]) -> bool:
        """Whether a tensor made inside the step is among those with these ids."""
        return any(id(tensor) in tensors for tensor, _ in self._initial)

    def detach(self) -> None:
        """Drop the graphs of CPU tensors of the step, which refer to `jax` tensors.

        An autograd function may return such a tensor: that of `torch.utils.checkpoint` does before
        torch 2.13.
        """
        for tensor, _ in self._initial:
            if tensor.grad_fn is not None and not is_view(tensor):
                tensor.detach_()
        self.results[:] = pytree.tree_map(_without_graph, self.results)

    def reset(self) -> None:
        """Restore the initial values of tensors that were created inside the step."""
        _copy_back(self._initial)

    def replay(self) -> None:
        """Run the recorded operations again, on the current values."""
        if self._replayed is None or self._replayed.count != len(self.ops):
            self._replayed = ReplayedOps(self.ops, self.results)
            self._reset = [pair for pair in self._initial if self._replayed.may_write(pair[0])]
        if self._reset:
            _copy_back(self._reset)
        self._replayed.run()


def _copy_back(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with torch.no_grad():
        for tensor, initial in pairs:
            tensor.copy_(initial)


def _without_graph(result: Any) -> Any:
    if isinstance(result, torch.Tensor) and result.grad_fn is not None:
        return result.detach()
    return result


def _is_on_device(argument: Any) -> bool:
    """Whether an argument is a tensor that is not on the CPU, or a list that begins with one."""
    if type(argument) is list and argument:
        argument = argument[0]
    return isinstance(argument, torch.Tensor) and type(argument) not in _PLAIN


def _on_other_device(kwargs: Any) -> bool:
    device = kwargs.get("device")
    return device is not None and torch.device(device).type != "cpu"


def _has_values(result: Any) -> bool:
    """Whether a result has Python numbers."""
    return any(isinstance(leaf, bool | int | float) for leaf in pytree.tree_leaves(result))


_ANOMALY = (
    " With anomaly detection on, torch reads every gradient: switch it off, or call the step "
    "function without compile meanwhile."
)
_PLAIN = (torch.Tensor, torch.nn.Parameter)
