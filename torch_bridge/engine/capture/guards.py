"""Guards: whether every Python value that a captured step has read is unchanged.

A `Guard` stores the values of many sources. `check` compares all of them on every call of a
compiled step, so it does so in C, by identity. Where an object was replaced, `change` compares
values: an equal number, string or tuple of such is no change.

A dictionary with an unchanged version (CPython 3.11) has unchanged items: one comparison for all
that was read of it. All other values go through one chain of iterators, at about 30 ns each. So do
the values of a dictionary that changes again and again although what was read of it does not: the
globals of a script whose loop has a counter.

>>> from isoshard.torch_bridge.engine.capture.guard_sources import Elements
>>> class Trainer: ...
>>> trainer = Trainer()
>>> trainer.beta, trainer.layers = 0.5, [1, 2]
>>> guard = Guard([Names(vars(trainer), ("beta",), "trainer."), Elements(trainer.layers, "layers")])
>>> guard.check()
True
>>> trainer.beta = -0.0
>>> guard.check(), guard.change().text
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
    InstanceTypes,
    Items,
    Members,
    Names,
    Namespaces,
    Source,
)

UNRELATED_CHANGES = 4
"""Consecutive checks that find a dictionary changed, but nothing that was read of it, before its
values are compared instead of its version."""


def versioned_dict(source: Source) -> dict[Any, Any] | None:
    """The dictionary with the values of a source; None where its version is no evidence."""
    base = source.base
    if dict_version is None or not isinstance(source, Names | Items):
        return None
    if isinstance(base, types.MappingProxyType):  # of a class, whose dictionary is never replaced
        (base,) = gc.get_referents(base)
    if not isinstance(base, dict) or isinstance(base, collections.OrderedDict):
        return None  # the order of an OrderedDict has no version
    return None if _is_empty(base, base) else base  # its truth value is faster


def version_of(source: Source) -> int | None:
    """The version of that dictionary."""
    items = versioned_dict(source)
    return None if dict_version is None or items is None else dict_version(items)


class GroupedSources:
    """Sources in groups that are compared in C, with their expected values.

    Args:
        sources: the sources.
        values: of each, as returned by `Source.read`.
        versions: of the dictionary of each, from before it was read.
        may_change: whether some value of a source may change.
        is_unchanged: the slow comparison of one source, by value.

    Attributes:
        unrelated: indices of the sources whose dictionary changes though their values do not.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        values: Sequence[list[Any]],
        versions: Sequence[int | None],
        may_change: Callable[[Source, Sequence[Any]], bool],
        is_unchanged: Callable[[Source, Sequence[Any]], bool],
    ):
        """Group the sources."""
        self._is_unchanged = is_unchanged
        self._checks = 0
        self.unrelated: set[int] = set()
        self._versioned: list[tuple[int, Source, list[Any]]] = []
        self._changes: dict[int, tuple[int, int]] = {}
        self._empty: list[Any] = []  # one `any` for all
        self._sized: list[Any] = []
        self._iterables: list[Any] = []
        self._dicts: list[dict[Any, Any]] = []
        self._getters: list[Any] = []
        self._bases: list[Any] = []
        self._cells: list[types.CellType] = []
        self._ungrouped: list[tuple[Source, list[Any]]] = []
        self._instances: list[Any] = []
        self._with_dict: list[Any] = []
        self._absent: list[tuple[Any, tuple[str, ...]]] = []
        self._expected: dict[str, list[Any]] = collections.defaultdict(list)
        dicts: list[dict[Any, Any]] = []
        expected_versions: list[int] = []
        for index, source in enumerate(sources):
            before, version = values[index], versions[index]
            items = None if version is None else versioned_dict(source)
            if items is not None and version is not None:
                dicts.append(items)
                expected_versions.append(version)
                self._versioned.append((index, source, before))
            elif may_change(source, before):
                self._ungrouped.append((source, before))
            else:
                self._add(source, before)
        self._current_versions = DictVersions(dicts)
        self._versions = np.array(expected_versions, np.uint64)
        self._lengths = list(map(len, self._sized))
        groups = ("iterables", "values", "names", "cells", "types", "namespaces")
        self._expected_values = list(chain.from_iterable(self._expected[group] for group in groups))

    def _add(self, source: Source, before: list[Any]) -> None:
        base, expected = source.base, self._expected
        if isinstance(source, Items | Elements | Members) and _is_empty(base, before):
            self._empty.append(base)
        elif isinstance(source, Items):
            self._sized.append(base)
            self._iterables.append(base)
            self._dicts.append(base)
            expected["iterables"] += before[::2]
            expected["values"] += before[1::2]
        elif isinstance(source, Elements | Members):
            self._sized.append(base)
            self._iterables.append(base)
            expected["iterables"] += before
        elif isinstance(source, InstanceTypes):
            self._instances += base
            expected["types"] += before
        elif isinstance(source, Namespaces):
            self._with_dict += base
            expected["namespaces"] += before
        elif isinstance(source, Cell) and before[0] is not MISSING:
            self._cells.append(base)
            expected["cells"] += before
        elif isinstance(source, Names | Fields) and not any(value is MISSING for value in before):
            self._add_names(source, before)
        else:
            self._ungrouped.append((source, before))

    def _add_names(self, source: Names | Fields, before: list[Any]) -> None:
        base = source.base
        if isinstance(source, Names) and source.path:  # not the globals of a module
            (self._empty if _is_empty(base, base) else self._sized).append(base)
        if isinstance(source, Names) and source.absent:
            self._absent.append((base, source.absent))
        if before:
            get = operator.itemgetter if isinstance(source, Names) else operator.attrgetter
            keys = source.keys if len(before) > 1 else source.keys * 2
            self._getters.append(get(*keys))
            self._bases.append(base)
            self._expected["names"] += before if len(before) > 1 else before * 2

    def check(self) -> bool:
        """Whether all values are unchanged.

        Raises:
            LookupError, AttributeError, ValueError: a name was deleted, or a cell is empty.
            RuntimeError: another thread changes a dictionary meanwhile.
        """
        self._checks += 1
        return (
            not any(self._empty)
            and self._dicts_unchanged()
            and list(map(len, self._sized)) == self._lengths
            and all(map(operator.is_, self._current(), self._expected_values))
            and all(base.keys().isdisjoint(names) for base, names in self._absent)
            and (
                not self._ungrouped or all(self._is_unchanged(*other) for other in self._ungrouped)
            )
        )

    def _dicts_unchanged(self) -> bool:
        """Whether no dictionary changed, or nothing that was read of those that did."""
        now = self._current_versions.read()
        if now.tobytes() == self._versions.tobytes():
            return True
        for position in np.flatnonzero(now != self._versions).tolist():
            index, source, before = self._versioned[position]
            if not self._is_unchanged(source, before):
                return False
            self._versions[position] = now[position]
            check, times = self._changes.get(position, (0, 0))
            times = times + 1 if check == self._checks - 1 else 1
            self._changes[position] = self._checks, times
            if times == UNRELATED_CHANGES:
                self.unrelated.add(index)
        return True

    def _current(self) -> Iterator[Any]:
        return chain(
            chain.from_iterable(self._iterables),
            chain.from_iterable(map(dict.values, self._dicts)),
            chain.from_iterable(map(_CALL, self._getters, self._bases)),
            map(_CONTENTS, self._cells),
            map(type, self._instances),
            map(_NAMESPACE, self._with_dict),
        )


def _is_empty(base: Any, values: Any) -> bool:
    """Whether a container is empty and its truth value shows when it no longer is."""
    return not values and type(base) in _CONTAINERS


_CONTAINERS = {dict, set, list, collections.OrderedDict, collections.defaultdict, collections.deque}
_CALL: Any = operator.call
_CONTENTS = operator.attrgetter("cell_contents")
_NAMESPACE = operator.attrgetter("__dict__")


@dataclasses.dataclass(frozen=True)
class Change:
    """A value that changed.

    Attributes:
        name: its expression in user code.
        before: the earlier value.
        now: the current value.
        source: its source.
        index: which of the source's values; -1 for a name that was added.
        key: `Source.key` of the value.
    """

    name: str
    before: Any
    now: Any
    source: Source
    index: int
    key: tuple[int, Any]

    @property
    def text(self) -> str:
        """For messages."""
        return f"{self.name} was {_short(self.before)} and is {_short(self.now)}"

    @property
    def single_source(self) -> Source | None:
        """A source of this value alone, if it can be replaced."""
        return self.source.select(self.index) if self.index >= 0 else None


_Skip = Callable[[Source, int], bool] | None


class Guard:
    """The values of some sources at one time.

    Args:
        sources: the sources.
        skip: whether `(source, index)` may change.
    """

    def __init__(self, sources: Sequence[Source], skip: _Skip = None):
        """Store the current values."""
        self.sources = list(sources)
        self._skip = skip
        self._unrelated: set[int] = set()  # indices of sources to compare by value
        self._versions = self._current_versions()
        self._values = [source.read() for source in self.sources]
        self._group()

    def check(self) -> bool:
        """Whether every value is identical or equal."""
        groups = self._groups
        try:
            if groups.check():
                if groups.unrelated:
                    self._unrelated |= groups.unrelated
                    self._group()
                return True
        except (LookupError, AttributeError, ValueError, RuntimeError):
            pass  # deleted, or changed by another thread meanwhile: compare one by one
        return self.change() is None

    def change(self) -> Change | None:
        """The first value that changed, or None; equal objects become the expected ones."""
        versions = self._current_versions()
        values = [source.read() for source in self.sources]
        for source, before, now in zip(self.sources, self._values, values, strict=True):
            for change in changes(source, before, self._skip, now):
                return change
        self._versions, self._values = versions, values
        self._group()
        return None

    def _current_versions(self) -> list[int | None]:
        """Of each source; read before its values, so that a later change is seen."""
        return [version_of(source) for source in self.sources]

    def _group(self) -> None:
        versions = [
            None if index in self._unrelated else version
            for index, version in enumerate(self._versions)
        ]
        # Functions, not methods: a cycle would keep what was read until a garbage collection.
        may_change, is_unchanged = (
            functools.partial(check, self._skip) for check in (_may_change, _is_unchanged)
        )
        self._groups = GroupedSources(
            self.sources, self._values, versions, may_change, is_unchanged
        )


def _may_change(skip: _Skip, source: Source, values: Sequence[Any]) -> bool:
    return skip is not None and any(skip(source, index) for index in range(len(values)))


def _is_unchanged(skip: _Skip, source: Source, before: Sequence[Any]) -> bool:
    return next(changes(source, before, skip), None) is None


def changes(
    source: Source,
    before: Sequence[Any],
    skip: _Skip = None,
    now: Sequence[Any] | None = None,
) -> Iterator[Change]:
    """The values of a source that are neither identical nor equal to the earlier ones.

    Args:
        source: the source.
        before: its earlier values.
        skip: see `Guard`.
        now: its current values; read if None.
    """
    now = source.read() if now is None else now
    for index in range(max(len(before), len(now))):
        old = before[index] if index < len(before) else MISSING
        new = settled(now[index]) if index < len(now) else MISSING
        if old is not new and not equal(old, new):
            if skip is None or type(old) is not type(new) or not skip(source, index):
                key = source.key(index) if index < len(now) else (id(source.base), None)
                yield Change(source.name(index), old, new, source, index, key)
    if isinstance(source, Names):
        for name in source.added():
            key = (id(source.base if source.owner is None else source.owner), name)
            yield Change(f"{source.path}{name}", MISSING, source.base[name], source, -1, key)


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
    return kind in _COMPARABLE and left == right


def is_plain(value: Any) -> bool:
    """Whether a value refers to no memory: a number, a string, a function, a class, None."""
    plain = bool | int | float | complex | str | bytes | type(None) | torch.dtype | enum.Enum
    code = types.FunctionType | types.CodeType | type
    return value is MISSING or isinstance(value, np.generic | plain | code)


_COMPARABLE = frozenset(
    {int, bool, str, bytes, range, slice, frozenset, torch.Size, torch.device, np.dtype}
)


def _short(value: Any) -> str:
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
