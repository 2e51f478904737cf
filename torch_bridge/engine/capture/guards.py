"""Whether everything that a captured step has read is as it was.

A `Guard` holds the values of many holders. `holds` looks at all of them on every call of a compiled
step, so it does so in C: the present values go through one chain of iterators and are compared by
identity, about 30 ns each. Where one is another object, `change` compares what the objects say: an
equal number, string or tuple of such is no change.

>>> class Trainer: ...
>>> trainer = Trainer()
>>> trainer.beta, trainer.layers = 0.5, [1, 2]
>>> guard = Guard([Names(vars(trainer), ("beta",), "trainer."), Elements(trainer.layers, "layers")])
>>> guard.holds()
True
>>> trainer.beta = -0.0
>>> guard.holds(), guard.change().text
(False, 'trainer.beta was 0.5 and is -0.0')
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import operator
import struct
import types
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from .holders import MISSING, Cell, Elements, Fields, Holder, Items, Kinds, Members, Names
from .symbolic import settled


@dataclasses.dataclass(frozen=True)
class Change:
    """A value that is another one.

    Attributes:
        name: how a program would write it.
        before: what it was.
        now: what it is.
        holder: what holds it.
        number: which of the holder's values; -1 for a name that is new.
        address: the same for two changes of the same value.
    """

    name: str
    before: Any
    now: Any
    holder: Holder
    number: int
    address: tuple[int, Any]

    @property
    def text(self) -> str:
        """For messages."""
        return f"{self.name} was {_brief(self.before)} and is {_brief(self.now)}"


class Guard:
    """Values as they were.

    Args:
        holders: what holds them.
        skip: `(holder, number)` of values that may change.
    """

    def __init__(
        self, holders: Sequence[Holder], skip: Callable[[Holder, int], bool] | None = None
    ):
        """Remember the present values."""
        self.holders = list(holders)
        self._skip = skip
        self._values = [holder.read() for holder in self.holders]
        self._arrange()

    def holds(self) -> bool:
        """Whether every value is the same, or equal."""
        try:
            if (
                not any(self._empty)
                and list(map(len, self._sized)) == self._lengths
                and all(map(operator.is_, self._present(), self._expected))
                and all(space.keys().isdisjoint(names) for space, names in self._absent)
            ):
                if not self._others or self._others_hold():
                    return True
        except (LookupError, AttributeError, ValueError, RuntimeError):
            pass  # a name is gone, a cell is empty, another thread changes a dictionary
        return self.change() is None

    def change(self) -> Change | None:
        """The first value that changed, or None; equal objects are taken over."""
        found = next(self._changes(), None)
        if found is None:
            self._values = [holder.read() for holder in self.holders]
            self._arrange()
        return found

    def _changes(self) -> Iterator[Change]:
        for holder, before in zip(self.holders, self._values, strict=True):
            yield from changes(holder, before, self._skip)

    def _arrange(self) -> None:
        """Sort the holders into groups that one chain of iterators reads."""
        self._empty: list[Any] = []  # asked all at once whether one has something by now
        self._sized: list[Any] = []
        self._whole: list[Any] = []
        self._dicts: list[dict[Any, Any]] = []
        self._getters: list[Any] = []
        self._named: list[Any] = []
        self._cells: list[types.CellType] = []
        self._others: list[tuple[Holder, list[Any]]] = []
        self._objects: list[Any] = []
        self._absent: list[tuple[Any, tuple[str, ...]]] = []
        whole, values, named, cells, kinds = [], [], [], [], []
        for holder, before in zip(self.holders, self._values, strict=True):
            thing = holder.thing
            if self._skips(holder, before):
                self._others.append((holder, before))
            elif isinstance(holder, Items | Elements | Members) and _is_empty(thing, before):
                self._empty.append(thing)
            elif isinstance(holder, Items):
                self._sized.append(thing)
                self._whole.append(thing)
                self._dicts.append(thing)
                whole += before[::2]
                values += before[1::2]
            elif isinstance(holder, Elements | Members):
                self._sized.append(thing)
                self._whole.append(thing)
                whole += before
            elif isinstance(holder, Kinds):
                self._objects += thing
                kinds += before
            elif isinstance(holder, Cell) and before[0] is not MISSING:
                self._cells.append(thing)
                cells += before
            elif isinstance(holder, Names | Fields) and not _any_missing(before):
                if isinstance(holder, Names) and holder.path:  # not the globals of a module
                    (self._empty if _is_empty(thing, thing) else self._sized).append(thing)
                if isinstance(holder, Names) and holder.absent:
                    self._absent.append((thing, holder.absent))
                if before:
                    get = operator.itemgetter if isinstance(holder, Names) else operator.attrgetter
                    keys = holder.keys if len(before) > 1 else holder.keys * 2
                    self._getters.append(get(*keys))
                    self._named.append(thing)
                    named += before if len(before) > 1 else before * 2
            else:
                self._others.append((holder, before))
        self._lengths = list(map(len, self._sized))
        self._expected = [*whole, *values, *named, *cells, *kinds]

    def _present(self) -> Iterator[Any]:
        return chain(
            chain.from_iterable(self._whole),
            chain.from_iterable(map(dict.values, self._dicts)),
            chain.from_iterable(map(_CALL, self._getters, self._named)),
            map(_CONTENTS, self._cells),
            map(type, self._objects),
        )

    def _skips(self, holder: Holder, values: Sequence[Any]) -> bool:
        skip = self._skip
        return skip is not None and any(skip(holder, number) for number in range(len(values)))

    def _others_hold(self) -> bool:
        return not any(
            next(changes(holder, before, self._skip), None) for holder, before in self._others
        )


def changes(
    holder: Holder, before: Sequence[Any], skip: Callable[[Holder, int], bool] | None = None
) -> Iterator[Change]:
    """The values of a holder that are neither what they were nor equal to it."""
    now = holder.read()
    for number in range(max(len(before), len(now))):
        old = before[number] if number < len(before) else MISSING
        new = settled(now[number]) if number < len(now) else MISSING
        if old is not new and not equal(old, new):
            if skip is None or type(old) is not type(new) or not skip(holder, number):
                address = holder.address(number) if number < len(now) else (id(holder.thing), None)
                yield Change(holder.name(number), old, new, holder, number, address)
    if isinstance(holder, Names):
        for key in holder.added():
            address = (id(holder.thing if holder.owner is None else holder.owner), key)
            yield Change(f"{holder.path}{key}", MISSING, holder.thing[key], holder, -1, address)


def equal(left: Any, right: Any) -> bool:
    """Whether two immutable values are the same to the last bit; False for anything else.

    >>> equal(0.0, 0.0), equal(0.0, -0.0), equal(1, True), equal((1, "a"), (1, "a"))
    (True, False, False, True)
    """
    kind = type(left)
    if kind is not type(right):
        return False
    if kind is float:
        return struct.pack("d", left) == struct.pack("d", right)
    if kind is complex:
        return struct.pack("dd", left.real, left.imag) == struct.pack("dd", right.real, right.imag)
    if kind is tuple:
        return len(left) == len(right) and all(
            a is b or equal(a, b) for a, b in zip(left, right, strict=True)
        )
    if isinstance(left, np.generic):
        return left.tobytes() == right.tobytes()
    if kind is types.MethodType:
        return left.__self__ is right.__self__ and left.__func__ is right.__func__
    return kind in _COMPARED and left == right


def is_plain(value: Any) -> bool:
    """Whether a value holds no memory: a number, a string, a function, a class, nothing."""
    plain = bool | int | float | complex | str | bytes | type(None) | torch.dtype | enum.Enum
    code = types.FunctionType | types.CodeType | type
    return value is MISSING or isinstance(value, np.generic | plain | code)


_COMPARED = frozenset(
    {int, bool, str, bytes, range, slice, frozenset, torch.Size, torch.device, np.dtype}
)


def _is_empty(thing: Any, values: Any) -> bool:
    """Whether a container of Python has nothing in it, which its truth says."""
    return not values and type(thing) in _CONTAINERS


_CONTAINERS = {dict, set, list, collections.OrderedDict, collections.defaultdict, collections.deque}
_CALL: Any = operator.call
_CONTENTS = operator.attrgetter("cell_contents")


def _any_missing(values: Sequence[Any]) -> bool:
    return any(value is MISSING for value in values)


def _brief(value: Any) -> str:
    if value is MISSING:
        return "not there"
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, bool | int | float | complex | str | bytes | type(None)) or (
        isinstance(value, tuple | torch.dtype)
    ):
        text = repr(value)
        return text if len(text) <= 60 else f"{text[:57]}..."
    return f"one {type(value).__name__}" if not isinstance(value, type) else value.__qualname__
