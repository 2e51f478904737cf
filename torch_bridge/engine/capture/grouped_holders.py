"""Holders in groups, so that the guard over all that a step has read is checked in C.

A dictionary whose version is the same holds what it held (CPython 3.11): one look for all that was
read of it. Other values go through one chain of iterators and are compared by identity, about 30 ns
each. So do the values of a dictionary that changes again and again, though what was read of it does
not: the globals of a script whose loop has a counter.
"""

from __future__ import annotations

import collections
import gc
import operator
import types
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np

from isoshard.torch_bridge._torch_internals.dict_versions import DictVersions, dict_version

from .holders import (
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
