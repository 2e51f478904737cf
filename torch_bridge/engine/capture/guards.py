"""Guards: whether every Python value that a captured step has read is unchanged.

A `Guard` stores the values of many holders. `holds` checks all of them on every call of a compiled
step, so it does so in C, by identity. Where an object was replaced, `change` compares values: an
equal number, string or tuple of such is no change.

A dictionary with an unchanged version (CPython 3.11) has unchanged items: one comparison for all
that was read of it. All other values go through one chain of iterators, at about 30 ns each. So do
the values of a dictionary that changes again and again although what was read of it does not: the
globals of a script whose loop has a counter.

>>> from isoshard.torch_bridge.engine.capture.guard_sources import Elements
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
import functools
import gc
import operator
import struct
import types
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from isoshard.torch_bridge._torch_internals.dict_versions import DictVersions, dict_version
from isoshard.torch_bridge.engine.values.symbolic_numbers import settled

from .guard_sources import (
    MISSING,
    Cell,
    Elements,
    Fields,
    Holder,
    Items,
    Kinds,
    Members,
    Names,
    Namespaces,
)

OFTEN = 4
"""Looks in a row that find a dictionary changed, and what was read of it not, before its values are
looked at instead."""


def space(holder: Holder) -> dict[Any, Any] | None:
    """The dictionary with the values of a holder; None where its version tells nothing."""
    thing = holder.thing
    if dict_version is None or not isinstance(holder, Names | Items):
        return None
    if isinstance(thing, types.MappingProxyType):  # of a class, which has its dictionary for ever
        (thing,) = gc.get_referents(thing)
    if not isinstance(thing, dict) or isinstance(thing, collections.OrderedDict):
        return None  # the order of an OrderedDict is kept elsewhere
    return None if _is_empty(thing, thing) else thing  # its truth is faster


def version(holder: Holder) -> int | None:
    """The version of that dictionary."""
    found = space(holder)
    return None if dict_version is None or found is None else dict_version(found)


class Arranged:
    """Holders with the values that they are to hold.

    Args:
        holders: what holds them.
        values: of each, as `Holder.read` gave them.
        versions: of each, from before it was read.
        skips: whether some value of a holder may change.
        holds: whether a holder's values are the same or equal, however long it takes.
    """

    def __init__(
        self,
        holders: Sequence[Holder],
        values: Sequence[list[Any]],
        versions: Sequence[int | None],
        skips: Callable[[Holder, Sequence[Any]], bool],
        holds: Callable[[Holder, Sequence[Any]], bool],
    ):
        """Sort the holders into groups."""
        self._holds = holds
        self._looks = 0
        self.often: set[int] = set()
        """Numbers of holders to be grouped by value instead."""
        self._counted: list[tuple[int, Holder, list[Any]]] = []
        self._changed: dict[int, tuple[int, int]] = {}
        self._empty: list[Any] = []  # asked all at once whether one has something by now
        self._sized: list[Any] = []
        self._whole: list[Any] = []
        self._dicts: list[dict[Any, Any]] = []
        self._getters: list[Any] = []
        self._named: list[Any] = []
        self._cells: list[types.CellType] = []
        self._others: list[tuple[Holder, list[Any]]] = []
        self._objects: list[Any] = []
        self._bearers: list[Any] = []
        self._absent: list[tuple[Any, tuple[str, ...]]] = []
        self._expected: dict[str, list[Any]] = collections.defaultdict(list)
        spaces: list[dict[Any, Any]] = []
        looked: list[int] = []
        for number, holder in enumerate(holders):
            before, known = values[number], versions[number]
            found = None if known is None else space(holder)
            if found is not None and known is not None:
                spaces.append(found)
                looked.append(known)
                self._counted.append((number, holder, before))
            elif skips(holder, before):
                self._others.append((holder, before))
            else:
                self._sort(holder, before)
        self._present_versions = DictVersions(spaces)
        self._versions = np.array(looked, np.uint64)
        self._lengths = list(map(len, self._sized))
        groups = ("whole", "values", "named", "cells", "kinds", "namespaces")
        self._wanted = list(chain.from_iterable(self._expected[group] for group in groups))

    def _sort(self, holder: Holder, before: list[Any]) -> None:
        thing, expected = holder.thing, self._expected
        if isinstance(holder, Items | Elements | Members) and _is_empty(thing, before):
            self._empty.append(thing)
        elif isinstance(holder, Items):
            self._sized.append(thing)
            self._whole.append(thing)
            self._dicts.append(thing)
            expected["whole"] += before[::2]
            expected["values"] += before[1::2]
        elif isinstance(holder, Elements | Members):
            self._sized.append(thing)
            self._whole.append(thing)
            expected["whole"] += before
        elif isinstance(holder, Kinds):
            self._objects += thing
            expected["kinds"] += before
        elif isinstance(holder, Namespaces):
            self._bearers += thing
            expected["namespaces"] += before
        elif isinstance(holder, Cell) and before[0] is not MISSING:
            self._cells.append(thing)
            expected["cells"] += before
        elif isinstance(holder, Names | Fields) and not any(one is MISSING for one in before):
            self._sort_names(holder, before)
        else:
            self._others.append((holder, before))

    def _sort_names(self, holder: Names | Fields, before: list[Any]) -> None:
        thing = holder.thing
        if isinstance(holder, Names) and holder.path:  # not the globals of a module
            (self._empty if _is_empty(thing, thing) else self._sized).append(thing)
        if isinstance(holder, Names) and holder.absent:
            self._absent.append((thing, holder.absent))
        if before:
            get = operator.itemgetter if isinstance(holder, Names) else operator.attrgetter
            keys = holder.keys if len(before) > 1 else holder.keys * 2
            self._getters.append(get(*keys))
            self._named.append(thing)
            self._expected["named"] += before if len(before) > 1 else before * 2

    def hold(self) -> bool:
        """Whether all hold what they held.

        Raises:
            LookupError, AttributeError, ValueError: a name is gone, or a cell is empty.
            RuntimeError: another thread changes a dictionary meanwhile.
        """
        self._looks += 1
        return (
            not any(self._empty)
            and self._spaces_hold()
            and list(map(len, self._sized)) == self._lengths
            and all(map(operator.is_, self._present(), self._wanted))
            and all(named.keys().isdisjoint(names) for named, names in self._absent)
            and (not self._others or all(self._holds(*other) for other in self._others))
        )

    def _spaces_hold(self) -> bool:
        """Whether no dictionary changed, or nothing that was read of those that did."""
        now = self._present_versions.read()
        if now.tobytes() == self._versions.tobytes():
            return True
        for place in np.flatnonzero(now != self._versions).tolist():
            number, holder, before = self._counted[place]
            if not self._holds(holder, before):
                return False
            self._versions[place] = now[place]
            look, times = self._changed.get(place, (0, 0))
            times = times + 1 if look == self._looks - 1 else 1
            self._changed[place] = self._looks, times
            if times == OFTEN:
                self.often.add(number)
        return True

    def _present(self) -> Iterator[Any]:
        return chain(
            chain.from_iterable(self._whole),
            chain.from_iterable(map(dict.values, self._dicts)),
            chain.from_iterable(map(_CALL, self._getters, self._named)),
            map(_CONTENTS, self._cells),
            map(type, self._objects),
            map(_NAMESPACE, self._bearers),
        )


def _is_empty(thing: Any, values: Any) -> bool:
    """Whether a container of Python has nothing in it, which its truth says."""
    return not values and type(thing) in _CONTAINERS


_CONTAINERS = {dict, set, list, collections.OrderedDict, collections.defaultdict, collections.deque}
_CALL: Any = operator.call
_CONTENTS = operator.attrgetter("cell_contents")
_NAMESPACE = operator.attrgetter("__dict__")


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


_Skip = Callable[[Holder, int], bool] | None


class Guard:
    """Values as they were.

    Args:
        holders: what holds them.
        skip: `(holder, number)` of values that may change.
    """

    def __init__(self, holders: Sequence[Holder], skip: _Skip = None):
        """Remember the present values."""
        self.holders = list(holders)
        self._skip = skip
        self._often: set[int] = set()  # numbers of holders whose dictionary tells nothing
        self._versions = self._present_versions()
        self._values = [holder.read() for holder in self.holders]
        self._arrange()

    def holds(self) -> bool:
        """Whether every value is the same, or equal."""
        arranged = self._arranged
        try:
            if arranged.hold():
                if arranged.often:
                    self._often |= arranged.often
                    self._arrange()
                return True
        except (LookupError, AttributeError, ValueError, RuntimeError):
            pass  # what was read is not there, or another thread changes it: look at each
        return self.change() is None

    def change(self) -> Change | None:
        """The first value that changed, or None; equal objects are taken over."""
        versions = self._present_versions()
        values = [holder.read() for holder in self.holders]
        for holder, before, now in zip(self.holders, self._values, values, strict=True):
            for change in changes(holder, before, self._skip, now):
                return change
        self._versions, self._values = versions, values
        self._arrange()
        return None

    def _present_versions(self) -> list[int | None]:
        """Of each holder, to be asked before its values: what changes later has another one."""
        return [version(holder) for holder in self.holders]

    def _arrange(self) -> None:
        versions = [
            None if number in self._often else one for number, one in enumerate(self._versions)
        ]
        # Functions, not methods: what was read is to be freed with the step, not by a collection.
        skips, holds = (functools.partial(ask, self._skip) for ask in (_skips, _holds))
        self._arranged = Arranged(self.holders, self._values, versions, skips, holds)


def _skips(skip: _Skip, holder: Holder, values: Sequence[Any]) -> bool:
    return skip is not None and any(skip(holder, number) for number in range(len(values)))


def _holds(skip: _Skip, holder: Holder, before: Sequence[Any]) -> bool:
    return next(changes(holder, before, skip), None) is None


def changes(
    holder: Holder,
    before: Sequence[Any],
    skip: _Skip = None,
    now: Sequence[Any] | None = None,
) -> Iterator[Change]:
    """The values of a holder that are neither what they were nor equal to it.

    Args:
        holder: what holds them.
        before: what they were.
        skip: see `Guard`.
        now: what they are; read, if it is not given.
    """
    now = holder.read() if now is None else now
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
