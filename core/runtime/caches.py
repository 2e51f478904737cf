"""Caches: tables and functions that keep a bounded number of results, in one registry.

For what is computed once for each shape, sharding or constant of a program: a program whose shapes
never end must not fill the memory. Each cache has a name and a bound; `isoshard.metrics` shows
their sizes and empties them.

>>> squares = Bounded(2, "squares")
>>> for n in range(4):
...     squares[n] = n * n
>>> squares, cache_sizes()["squares"]
({2: 4, 3: 9}, CacheSize(entries=2, bound=2, caches=1))
>>> recent = Recent(4, "recent squares")
>>> for n in range(6):
...     recent[n] = n * n
>>> recent.lookup(0), recent.lookup(2), recent.lookup(5)
(None, 4, 25)
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, ParamSpec, Protocol, TypeVar, cast

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
_Args = ParamSpec("_Args")
_Result = TypeVar("_Result", covariant=True)

PROGRAMS = 1024
"""Entries that are, or lead to, a compiled program each."""

CALLS = 4096
"""Calls of one operator, with other shapes or constants, that need no more working out."""


class CacheSize(NamedTuple):
    """How full the caches of one name are.

    Attributes:
        entries: of all of them together.
        bound: entries that each keeps at most.
        caches: how many there are; of a table that each compiled function has, one for each.

    Example:
        >>> all(size.entries <= size.bound * size.caches for size in cache_sizes().values())
        True
    """

    entries: int
    bound: int
    caches: int


class _Table(Protocol):
    def __len__(self) -> int: ...

    def clear(self) -> None: ...


class _Tables:
    """The caches of one name."""

    def __init__(self, bound: int, agreed: bool):
        self.bound, self.agreed = bound, agreed
        self._alive: dict[int, Callable[[], _Table | None]] = {}

    def add(self, table: Any) -> None:
        """Add a table, which goes when its owner does."""
        key = id(table)
        self._alive[key] = weakref.ref(table, lambda _: self._alive.pop(key, None))

    def add_permanent(self, table: _Table) -> None:
        """Add the table of a module."""
        self._alive[id(table)] = lambda: table

    def tables(self) -> list[_Table]:
        """Those that are alive."""
        return [table for find in list(self._alive.values()) if (table := find()) is not None]


_REGISTRY: dict[str, _Tables] = {}


def _registered(name: str, bound: int, agreed: bool = False) -> _Tables:
    return _REGISTRY.setdefault(name, _Tables(bound, agreed))


def cache_sizes() -> dict[str, CacheSize]:
    """The size of every cache of this process, by its name.

    Caches of functions are named by the function. Those of modules that are not imported yet are
    not listed.

    Example:
        >>> cache_sizes()["core.layout.spec._cached"].bound
        8192
    """
    sizes = {}
    for name, kind in sorted(_REGISTRY.copy().items()):
        tables = kind.tables()
        sizes[name] = CacheSize(sum(map(len, tables)), kind.bound, len(tables))
    return sizes


def clear_caches() -> None:
    """Empty every cache: compiled programs, traced functions and results derived from them.

    Entries are computed again when they are needed, so the next calls take as long as the first.
    Agreements between processes remain, as the others would not take part again. JAX's own caches
    are emptied by `jax.clear_caches()`. A step of torch that was compiled as one program
    (`compile`) owns its programs, for as long as it lives.

    Example:
        >>> squares = Bounded(8, "squares")
        >>> squares[3] = 9
        >>> clear_caches()
        >>> squares
        {}
    """
    for kind in list(_REGISTRY.values()):
        if not kind.agreed:
            for table in kind.tables():
                table.clear()


class Bounded(dict[_Key, _Value], Generic[_Key, _Value]):
    """A dictionary of the newest entries; reading one costs what it costs in a `dict`.

    Args:
        most: how many it keeps.
        name: of the cache, as `cache_sizes` lists it.
        agreed: whether several processes agreed on the entries: all of them forget the same, so
            `clear_caches` leaves them.
    """

    most: int = PROGRAMS

    def __init__(self, most: int, name: str, *, agreed: bool = False):
        """Start empty."""
        super().__init__()
        self.most = most
        _registered(name, most, agreed).add(self)

    def __setitem__(self, key: _Key, value: _Value) -> None:
        """Keep an entry, and forget the oldest if there are too many."""
        super().__setitem__(key, value)
        while len(self) > self.most:
            try:
                del self[next(iter(self))]
            except (KeyError, RuntimeError, StopIteration):  # another thread was faster
                continue


class Recent(dict[_Key, _Value], Generic[_Key, _Value]):
    """A dictionary of the entries used last.

    They are in two halves. The newer one is this `dict`, so finding an entry with `get` costs what
    it costs there. `again` looks further and brings what it finds to the newer half. When that is
    full it becomes the older one, whose entries go.

    Args:
        most: how many entries both halves hold together.
        name: of the cache, as `cache_sizes` lists it.
    """

    def __init__(self, most: int, name: str):
        """Start empty."""
        super().__init__()
        self.most = most
        self.half = most // 2
        self.older: dict[_Key, _Value] = {}
        self._turning = threading.RLock()
        _registered(name, most).add(self)

    def again(self, key: _Key) -> _Value | None:
        """The entry that `get` did not find, if it is kept elsewhere."""
        value = self.older.get(key)
        if value is not None:
            self[key] = value
        return value

    def lookup(self, key: _Key) -> _Value | None:
        """What `get` or else `again` finds."""
        value = self.get(key)
        return self.again(key) if value is None else value

    def clear(self) -> None:
        """Forget both halves."""
        with self._turning:
            dropped = self.older, dict(self)
            self.older = {}
            super().clear()
        del dropped  # what goes with it goes now, when nothing is locked

    def __setitem__(self, key: _Key, value: _Value) -> None:
        """Keep an entry, and forget the older half if the newer one is full."""
        dropped = None
        with self._turning:
            if len(self) >= self.half and key not in self:
                dropped, self.older = self.older, dict(self)
                super().clear()
            super().__setitem__(key, value)
        del dropped  # likewise


class Interned(Recent[_Key, _Value]):
    """Recent entries, and those that are alive because somebody else holds the value.

    As long as a value lives, its key leads to it and to no other, also after `clear`.

    Args:
        most: how many entries without other references are kept.
        name: of the cache, as `cache_sizes` lists it.
    """

    def __init__(self, most: int, name: str):
        """Start empty."""
        super().__init__(most, name)
        self.alive: weakref.WeakValueDictionary[_Key, _Value] = weakref.WeakValueDictionary()

    def again(self, key: _Key) -> _Value | None:
        """As `Recent.again`; also an entry that is forgotten, if its value is alive."""
        value = self.alive.get(key)
        if value is not None:
            super().__setitem__(key, value)
        return value

    def __setitem__(self, key: _Key, value: _Value) -> None:
        """As in `Recent`."""
        self.alive[key] = value
        super().__setitem__(key, value)

    def intern(self, key: _Key, value: _Value) -> _Value:
        """Keep an entry unless another thread was faster; returns what the key leads to."""
        with self._turning:
            interned = self.alive.get(key)
            if interned is None:
                interned = value
                self[key] = value
        return interned


class Cached(Protocol[_Args, _Result]):
    """A function with a cache, as `functools.lru_cache` makes it."""

    def __call__(self, *args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        """The result, computed the first time."""
        ...

    def cache_clear(self) -> None:
        """Forget all results."""
        ...


def cached(
    most: int, name: str | None = None
) -> Callable[[Callable[_Args, _Result]], Cached[_Args, _Result]]:
    """`functools.lru_cache` for a function of a module, in the registry.

    Args:
        most: results that are kept.
        name: of the cache; None is that of the function, below `isoshard`.

    Example:
        >>> @cached(16, "doubled numbers")
        ... def doubled(x):
        ...     return 2 * x
        >>> doubled(4), cache_sizes()["doubled numbers"]
        (8, CacheSize(entries=1, bound=16, caches=1))
    """

    def decorated(function: Callable[_Args, _Result]) -> Cached[_Args, _Result]:
        wrapper = functools.lru_cache(maxsize=most)(function)
        path = f"{function.__module__}.{function.__qualname__}".removeprefix("isoshard.")
        register(name or path, most, lambda: wrapper.cache_info().currsize, wrapper.cache_clear)
        return cast(Any, wrapper)

    return decorated


class _Permanent:
    """A cache of a module, by its two functions."""

    def __init__(self, size: Callable[[], int], clear: Callable[[], None]):
        self._size = size
        self.clear = clear

    def __len__(self) -> int:
        return self._size()


def register(name: str, bound: int, size: Callable[[], int], clear: Callable[[], None]) -> None:
    """List a cache of another kind, which lives as long as its module.

    Args:
        name: of the cache.
        bound: entries that it keeps at most.
        size: counts its entries.
        clear: empties it.
    """
    _registered(name, bound).add_permanent(_Permanent(size, clear))
