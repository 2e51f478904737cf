"""Torch code recorded as a subprogram: the body of a loop or of a function, not run as it is.

Inside `SubTrace`, operations go to a list of their own. Its inputs are placeholder tensors; what
the code reads from around it is found out and becomes an input as well, so nothing is frozen.
Tensors from around that require a gradient are replaced by aliases that end the autograd graph, so
the gradient of the code can be taken without what is behind them.

>>> import torch
>>> from isoshard.torch_bridge.engine.values.value import Aval
>>> scale = torch.tensor([10.0]).to("jax")
>>> subtrace = SubTrace()
>>> x = subtrace.input(Aval.contiguous((1,), torch.float32))
>>> with subtrace:
...     y = x * scale + 1
>>> [recipes[entry[0]].name for entry in subtrace.program if isinstance(entry[0], int)]
['aten::mul.Tensor', 'aten::add.Tensor']
>>> [storage is scale._storage for storage in subtrace.outside]
[True]
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from isoshard.core.errors import NoValueError
from isoshard.core.runtime import metrics
from isoshard.core.runtime._jax_internals.tracers import Tracer
from isoshard.torch_bridge._torch_internals import pytree
from isoshard.torch_bridge._torch_internals.higher_order_ops import is_control_flow
from isoshard.torch_bridge._torch_internals.tensor_fields import HOOK_FIELDS, sequence_number
from isoshard.torch_bridge.common.dtypes import logical_dtype
from isoshard.torch_bridge.engine.recording import lazy_tensor, random_state
from isoshard.torch_bridge.engine.recording.memory_log import MemoryLog, logged_to, note_constant
from isoshard.torch_bridge.engine.recording.origins import OriginLog, origin
from isoshard.torch_bridge.engine.recording.recipes import RECIPES as recipes
from isoshard.torch_bridge.engine.recording.recipes import Recipe
from isoshard.torch_bridge.engine.recording.recorder import (
    Recorder,
    materialize,
    recorder,
    replace,
)
from isoshard.torch_bridge.engine.values.value import Aval, Storage, Value


class SubTrace(Recorder):
    """A recorder of the operations of a subprogram.

    Attributes:
        program: the entries, as `Tape.program`.
        scalars: the lifted floats, in order of use.
        draws: for each entry that draws, how far its key is from the first, or a key's `Word` if
            the code seeds the device itself.
        outside: memory from before that the code reads.
        constants: values that the code brings from the host.
        aliases: tensors from around that require a gradient, and the replacement of each.
        frozen: tensors from around that the code uses and that require none.
        tokens: shape and dtype of each input, by slot.
        recipes: the recipes by the ids in the entries.
        noted: where each operation comes from.
        stand_in: gives the tensor that replaces one from around, or None.
        folded: computes a slot that depends on no input, where values are read early.
        axes: of a `jax.shard_map` around, over which the code communicates; those of a subprogram
            are also of the one around it.
    """

    def __init__(self) -> None:
        """Nothing recorded yet."""
        super().__init__()
        self.opened = True
        self.program: list[Any] = []
        self.noted = OriginLog()
        self.recipes: set[Recipe] = set()
        self.scalars: list[Any] = []
        self.draws: list[int | random_state.Word] = []
        self.outside: list[Storage] = []
        self.constants: list[Value] = []
        self.aliases: list[tuple[lazy_tensor.LazyTensor, lazy_tensor.LazyTensor]] = []
        self.frozen: list[weakref.ref[lazy_tensor.LazyTensor]] = []
        self.tokens: dict[int, tuple[tuple[int, ...], Any]] = {}
        self.log = self._touched = _Touched(self)
        self.stand_in: Callable[[lazy_tensor.LazyTensor], Any] | None = None
        self.folded: Callable[[int], Any] | None = None
        self.axes: set[str] | None = None
        self._makers: list[tuple[int, ...] | None] = []
        self._values: list[Value] = []
        self._foreign: dict[int, int] = {}
        self._views: dict[tuple[int, Any], Value] = {}
        self._input_values: dict[int, tuple[lazy_tensor.LazyTensor, Value]] = {}
        self._firsts: list[Value] = []
        self._mode = _Aliasing(self)
        self._mark: random_state.DrawnKeys | None = None
        self._ended = False

    def input(self, aval: Aval, *, requires_grad: bool = False) -> lazy_tensor.LazyTensor:
        """A placeholder tensor, for a value to come."""
        with logged_to(None):
            tensor = lazy_tensor.fresh(aval, self._leaf(*aval.token))
        self._touched.created[id(tensor._storage)] = -1
        self._input_values[id(tensor)] = (tensor, tensor._storage.value)
        tensor.requires_grad_(requires_grad)
        return tensor

    def __enter__(self) -> None:
        """Record here from now on."""
        around = recorder()
        if self.axes is None:
            self.axes = around.axes if isinstance(around, SubTrace) else set()
        self._ended = False
        self.take_over(around)
        self.noted.before = around.noted
        self.log = self._touched
        self._before = replace(self)
        self._mark = random_state.DrawnKeys()
        self._mark.__enter__()
        self._mode.__enter__()

    def __exit__(self, *exc: Any) -> None:
        """Record where it was recorded before."""
        assert self._mark is not None
        self._ended = True
        self._mode.__exit__(*exc)
        self._mark.__exit__(*exc)
        draws = self._mark.draws().words
        self._mark.restore()
        replace(self._before)
        for value in self.constants:
            note_constant(value)
        if exc[0] is None:
            before = sum(isinstance(draw, int) for draw in self.draws)
            self.draws += [self._relative(draw, before) for draw in draws]

    def _relative(self, draw: Any, before: int) -> int | random_state.Word:
        if len(draw) == 3:
            return draw
        state, offset = draw
        if state is not random_state.STATE:
            raise ValueError(
                "code that runs as one loop or one function draws from a torch.Generator of its "
                "own, which would give the same numbers each time; draw before, and pass the "
                "numbers in, or leave generator= out"
            )
        return before + offset

    # What a recorder does.

    def record(
        self, recipe: Recipe, inputs: Sequence[Value], scalars: Sequence[Any] = ()
    ) -> list[Value]:
        """Add an operation."""
        entry = (recipe.id, *[self.slot(value) for value in inputs])
        self.program.append(entry)
        self.recipes.add(recipe)
        self.scalars += scalars
        if recipe.random:
            random_state.take(self)
        self.noted.note(origin(self.noted))
        return [self._new(entry) for _ in range(recipe.count)]

    def view(self, base: Value, chain: Any) -> Value | None:
        """The value of a view that was read before."""
        return self._views.get((self.slot(base), chain))

    def keep_view(self, base: Value, chain: Any, view: Value) -> None:
        """Remember the value of a view."""
        self._views[self.slot(base), chain] = view

    # What the code did.

    def slot(self, value: Value) -> int:
        """The number of a value here."""
        if value.tape is self:
            return value.slot
        slot = self._foreign.get(id(value))
        if slot is None:
            if value.array is None:
                materialize([value])
            array: Any = value.array
            slot = self._add_foreign(value, array.shape, array.dtype)
            self.constants.append(value)
        return slot

    def slots(self, tensors: Sequence[lazy_tensor.LazyTensor]) -> list[int]:
        """The numbers of the present values of tensors; to be called inside."""
        return [self.slot(lazy_tensor.read(tensor)) for tensor in tensors]

    def alias(self, tensor: Any) -> Any:
        """The tensor that replaces one in here."""
        return self._mode.inside(tensor) if isinstance(tensor, lazy_tensor.LazyTensor) else tensor

    def maker(self, slot: int) -> tuple[int, ...] | None:
        """The entry that computes a slot; None for an input."""
        return self._makers[slot]

    def hoist(self, storage: Storage) -> None:
        """Make memory from before an input."""
        value = storage.value
        if value.tape is not self and id(value) not in self._foreign:
            self._add_foreign(value, *storage.aval.token)
            self.outside.append(storage)
            self._firsts.append(value)

    def around_slots(self) -> list[int]:
        """The slots of what each of `outside` had before, and of `constants`."""
        return [
            *(self._foreign[id(value)] for value in self._firsts),
            *map(self.slot, self.constants),
        ]

    def firsts(self) -> list[Value]:
        """The value of each of `outside` before."""
        return list(self._firsts)

    def constant_tensors(self) -> list[lazy_tensor.LazyTensor]:
        """`constants` as tensors."""
        tensors = []
        for value in self.constants:
            size, dtype = self.tokens[self.slot(value)]
            tensors.append(lazy_tensor.fresh(Aval.contiguous(size, logical_dtype(dtype)), value))
        return tensors

    def written(self) -> list[tuple[Storage, int]]:
        """Memory from before to which the code wrote, with the slot of its value now."""
        return [
            (storage, self.slot(storage.value))
            for storage, first in zip(self.outside, self._firsts, strict=True)
            if not self._is_same(storage.value, first)
        ]

    def written_inputs(self) -> list[lazy_tensor.LazyTensor]:
        """Inputs that the code wrote to."""
        return [
            tensor
            for tensor, first in self._input_values.values()
            if not self._is_same(tensor._storage.value, first)
        ]

    def refuse_gradients_behind(self, carried: Sequence[lazy_tensor.LazyTensor], what: str) -> None:
        """Refuse gradients taken inside with respect to tensors from around.

        What the runs before did with such a tensor would be missing where a graph leads to them.
        """
        self._mode.refuse_behind(carried, what)

    def put_back(self) -> None:
        """Restore the value of memory from before."""
        for storage, first in zip(self.outside, self._firsts, strict=True):
            storage.value = first

    def forget(self) -> None:
        """Drop the values from before, which every program would keep alive."""
        self._values.clear()
        self._firsts.clear()
        self._input_values.clear()
        self.constants = []
        self.outside = []
        self.aliases = []
        self._mode.forget()

    def constant(self, value: Value) -> Any:
        """The array of a value that depends on no input, and on no key; else None."""
        if self.folded is None or self._ended or self.axes:
            return None
        around = zip(self.around_slots(), [*self._firsts, *self.constants], strict=True)
        seen = {slot for slot, value in around if not isinstance(value.array, Tracer)}
        stack = [value.slot]
        while stack:
            slot = stack.pop()
            if slot not in seen:
                seen.add(slot)
                entry = self._makers[slot]
                if entry is None or recipes[entry[0]].random:
                    return None
                stack += entry[1:]
        return self.folded(value.slot)

    def check_execution(self) -> None:
        """Raise for a value that is needed now.

        Raises:
            NoValueError: JAX traces this.
            RuntimeError: it is a loop or a function of a compiled program.
        """
        if self.refusal is not None and not self._ended:
            raise NoValueError(f"{metrics.user_location()}: {self.refusal}")
        if self._ended:
            raise RuntimeError(_OUTLIVES if self.refusal is None else _OUTLIVES_A_TRACE)
        raise RuntimeError(
            "code that runs as one loop or one function of the compiled program needs the value of "
            "a tensor that is not computed yet. Return the tensor, and read it outside (for a "
            "Python branch, use torch.where)."
        )

    def _is_same(self, value: Value, first: Value) -> bool:
        """Whether a value is what it was, but for marks of its layout."""
        if value is first or (value.array is not None and value.array is first.array):
            return True
        if value.tape is not self:
            return False
        slot, begun = value.slot, self.slot(first)
        while slot != begun:
            entry = self._makers[slot]
            if entry is None or recipes[entry[0]].name != "mark_sharding":
                return False
            slot = entry[1]
        return True

    def _add_foreign(self, value: Value, shape: Any, dtype: Any) -> int:
        slot = self._foreign[id(value)] = self._leaf(shape, dtype).slot
        self._values.append(value)  # alive as long as its id is in use
        return slot

    def _leaf(self, shape: Any, dtype: Any) -> Value:
        value = self._new(None)
        self.tokens[value.slot] = (tuple(shape), dtype)
        self.program.append(self.tokens[value.slot])
        return value

    def _new(self, entry: tuple[int, ...] | None) -> Value:
        value = Value(tape=self, slot=len(self._makers))
        self._makers.append(entry)
        return value


class _Touched(MemoryLog):
    """Hands memory from before to a `SubTrace` when it is first read or written."""

    def __init__(self, subtrace: SubTrace):
        super().__init__(Recorder())
        self._subtrace = subtrace

    def touch(self, storage: Storage) -> None:
        if id(storage) not in self.created:
            self._subtrace.hoist(storage)


class _Aliasing(TorchFunctionMode):
    """Replaces tensors from around that require a gradient by leaves of their own."""

    def __init__(self, subtrace: SubTrace):
        super().__init__()
        self._subtrace = subtrace
        self._replacements: dict[int, Any] = {}
        self._begun = _sequence()
        self._carried: set[int] = set()
        self._what = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_dynamo_compiling():  # for `torch.cond`, which runs its graph here
            return func(*args, **(kwargs or {}))
        if not torch.is_grad_enabled() or recorder() is not self._subtrace or _is_of_hooks(func):
            return func(*args, **(kwargs or {}))
        args, kwargs = pytree.tree_map_only(
            lazy_tensor.LazyTensor, self.inside, (args, kwargs or {})
        )
        if func is torch.autograd.grad:
            self._check_gradient(*args, **kwargs)
        if is_control_flow(func):  # dynamo, which has looked at it, looks no further
            func = torch.compiler.disable(func)
        return func(*args, **kwargs)

    def refuse_behind(self, carried: Sequence[lazy_tensor.LazyTensor], what: str) -> None:
        self._carried, self._what = {id(tensor) for tensor in carried}, what

    def _check_gradient(self, outputs: Any, inputs: Any, *_: Any, **__: Any) -> None:
        leaves = pytree.tree_leaves(inputs)
        aliases = [
            alias for _, alias in self._subtrace.aliases if any(alias is leaf for leaf in leaves)
        ]
        if not aliases or not self._carried:
            return
        graphs = [leaf.grad_fn for leaf in pytree.tree_leaves(outputs) if leaf is not None]
        if not self._carried.isdisjoint(id(leaf) for leaf in leaves_of(graphs)):
            raise ValueError(
                f"{self._what} takes the gradient of a tensor of shape {tuple(aliases[0].shape)} "
                "from outside of the loop, and what earlier steps did with it would be missing. "
                "Detach what is handed on from step to step, or take the gradient outside."
            )

    def inside(self, tensor: lazy_tensor.LazyTensor) -> lazy_tensor.LazyTensor:
        cached = self._replacements.get(id(tensor))
        if cached is not None:
            return cached
        if self._is_from_inside(tensor):
            return tensor
        stand_in = self._subtrace.stand_in
        if stand_in is not None and (replacement := stand_in(tensor)) is not None:
            self._replacements[id(tensor)] = self._replacements[id(replacement)] = replacement
            return replacement
        if not tensor.requires_grad:
            self._subtrace.frozen.append(weakref.ref(tensor))
            return tensor
        if hasattr(tensor, "stacked"):
            raise RuntimeError(
                f"{tensor!r} comes from around a loop and requires a gradient; pass local tensors "
                "to the layers as arguments: scanned(x, local)"
            )
        alias: Any = tensor.detach().requires_grad_()
        self._subtrace.aliases.append((tensor, alias))
        self._replacements[id(tensor)] = self._replacements[id(alias)] = alias
        return alias

    def forget(self) -> None:
        """Drop its references to tensors."""
        self._replacements.clear()

    def _is_from_inside(self, tensor: lazy_tensor.LazyTensor) -> bool:
        if tensor.grad_fn is None:
            memory: Any = getattr(tensor, "stacked", tensor)  # local tensors share one storage
            return id(memory._storage) in self._subtrace.log.created
        return sequence_number(tensor.grad_fn) >= self._begun


def inside(tensors: Sequence[Any]) -> list[Any]:
    """The tensors that replace others in the code being recorded; themselves without one.

    Operators find it by themselves; a `torch.autograd.Function` is given its arguments as they are.
    """
    current = recorder()
    if not isinstance(current, SubTrace) or not torch.is_grad_enabled():
        return list(tensors)
    return [current.alias(tensor) for tensor in tensors]


def is_recording() -> bool:
    """Whether this thread records a subprogram."""
    return isinstance(recorder(), SubTrace)


def _is_of_hooks(func: Any) -> bool:
    """Whether a function sets the hooks of a tensor.

    Torch does while it makes the `grad_fn` of a view anew, and has it locked.
    """
    return getattr(getattr(func, "__self__", None), "__name__", None) == HOOK_FIELDS[0]


def _sequence() -> int:
    """The number of the next node of this thread's autograd graph."""
    with torch.enable_grad():
        node = torch.zeros((), requires_grad=True).view(()).grad_fn
    assert node is not None
    return sequence_number(node) + 1


_OUTLIVES = (
    "a tensor that was made by code that runs as one loop or one function of the compiled program "
    "outlives it: it was kept in an attribute, a list or a variable, and stands for a value of "
    "every step. Return the tensor from that code instead."
)
_OUTLIVES_A_TRACE = (
    "a tensor that was made while JAX traced torch code outlives the trace: it was kept in an "
    "attribute, a list or a variable, and has no value. Return the tensor from that code instead."
)


def leaves_of(graphs: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors that autograd graphs end in; a graph is a node or None.

    >>> x, y = torch.ones(2, requires_grad=True), torch.ones(2)
    >>> [leaf is x for leaf in leaves_of([(2 * x + y).grad_fn])]
    [True]
    """
    stack, seen, leaves = list(graphs), set(), []
    while stack:
        node: Any = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        stack += [following for following, _ in node.next_functions]
        variable = getattr(node, "variable", None)
        if variable is not None:
            leaves.append(variable)
    return leaves
