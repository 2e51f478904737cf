"""Sources of the values that a step reads in Python: attributes, globals, items, cells.

A source has one or more values: the attributes of an object that some code names, all items of a
dictionary, the contents of a closure's cell. `read` returns the current values, `restore` puts
earlier ones back, `name` returns the expression of one in user code.

>>> class Trainer: ...
>>> trainer = Trainer()
>>> trainer.beta = 0.5
>>> source = Names(vars(trainer), ("beta", "gamma"), "trainer.")
>>> source.read(), source.name(1)
([0.5, MISSING], 'trainer.gamma')
>>> trainer.beta = trainer.gamma = 3
>>> source.restore([0.5, MISSING])
>>> vars(trainer)
{'beta': 0.5}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np


class _Missing:
    """Stands for a value that does not exist."""

    def __repr__(self) -> str:
        return "MISSING"


MISSING: Any = _Missing()


class Source:
    """An object with values that a step can read.

    Args:
        base: the object.
        path: its expression in user code, for messages.
    """

    __slots__ = ("base", "path")

    def __init__(self, base: Any, path: str):
        """See the class."""
        self.base = base
        self.path = path

    def read(self) -> list[Any]:
        """The current values."""
        return list(self.base)

    def name(self, index: int) -> str:
        """The expression of one of the values in user code."""
        return self.path

    def restore(self, values: Sequence[Any]) -> None:
        """Put back values that `read` returned before."""

    def key(self, index: int) -> tuple[int, Any]:
        """Identifies a value: two sources of one value have equal keys."""
        return (id(self.base), index)

    def select(self, index: int) -> Source | None:
        """A source of one of the values, if it can be replaced."""
        return None


class _NamedSource(Source):
    __slots__ = ("keys",)

    def __init__(self, base: Any, keys: Sequence[str], path: str):
        super().__init__(base, path)
        self.keys = tuple(keys)

    def name(self, index: int) -> str:
        """The path and the name."""
        return f"{self.path}{self.keys[index]}"

    def key(self, index: int) -> tuple[int, Any]:
        """By name."""
        return (id(self.base), self.keys[index])

    def put(self, index: int, value: Any) -> None:
        """Replace one value."""

    def restore(self, values: Sequence[Any]) -> None:
        """Set and delete the names that have another value."""
        for index, (now, before) in enumerate(zip(self.read(), values, strict=True)):
            if now is not before:
                self.put(index, before)


def _never(key: str) -> bool:
    return False


class Names(_NamedSource):
    """Some names of a namespace: attributes of an object or a class, globals of a module.

    Args:
        base: the namespace.
        keys: which names.
        path: the prefix of a name, for messages.
        owner: the class, if it is the namespace of a class.
        watches: whether a name that is added later fails the guard.
        absent: the names that would, where they are few.
    """

    __slots__ = ("absent", "owner", "watches")

    def __init__(
        self,
        base: Mapping[str, Any],
        keys: Sequence[str],
        path: str,
        owner: type | None = None,
        watches: Callable[[str], bool] = _never,
        absent: tuple[str, ...] = (),
    ):
        """See the class."""
        super().__init__(base, keys, path)
        self.owner = owner
        self.watches = watches
        self.absent = absent

    def key(self, index: int) -> tuple[int, Any]:
        """By name; `vars` of a class is a new object each time."""
        return (id(self.base if self.owner is None else self.owner), self.keys[index])

    def added(self) -> list[str]:
        """Names that were added and fail the guard."""
        read = set(self.keys)
        return [key for key in self.base if key not in read and self.watches(key)]

    def restore(self, values: Sequence[Any]) -> None:
        """Set and delete the names that have another value, and delete those added."""
        super().restore(values)
        for key in self.added():
            if self.owner is None:
                self.base.pop(key, None)
            else:
                delattr(self.owner, key)

    def read(self) -> list[Any]:
        """The value of each name, or `MISSING`."""
        get = self.base.get
        return [get(key, MISSING) for key in self.keys]

    def select(self, index: int) -> Source:
        """One of the names."""
        return Names(self.base, self.keys[index : index + 1], self.path, self.owner)

    def put(self, index: int, value: Any) -> None:
        """Set or delete the name."""
        key = self.keys[index]
        if self.owner is None and value is MISSING:
            self.base.pop(key, None)
        elif self.owner is None:
            self.base[key] = value
        elif value is MISSING:
            delattr(self.owner, key)
        else:
            setattr(self.owner, key, value)


class Fields(_NamedSource):
    """Attributes that C stores: `__slots__`, the fields of a function or a `functools.partial`.

    Args:
        base: the object.
        keys: names of the attributes.
        path: the prefix of a name, for messages.
    """

    __slots__ = ()

    def read(self) -> list[Any]:
        """The value of each attribute, or `MISSING`."""
        return [getattr(self.base, key, MISSING) for key in self.keys]

    def select(self, index: int) -> Source:
        """One of the attributes."""
        return Fields(self.base, self.keys[index : index + 1], self.path)

    def put(self, index: int, value: Any) -> None:
        """Set or delete the attribute."""
        if value is MISSING:
            delattr(self.base, self.keys[index])
        else:
            setattr(self.base, self.keys[index], value)


class Items(Source):
    """All items of a dictionary, in order: key, value, key, value, .."""

    __slots__ = ()

    def read(self) -> list[Any]:
        """Keys and values."""
        items: list[Any] = []
        for pair in dict.items(self.base):
            items += pair
        return items

    def name(self, index: int) -> str:
        """The dictionary with the key in brackets."""
        keys = list(dict.keys(self.base))
        if index // 2 >= len(keys):
            return self.path
        key = keys[index // 2]
        if self.path.endswith("."):  # a table of a module's
            return f"{self.path}{key}"
        plain = isinstance(key, str | int | float | bool | None)
        return f"{self.path}[{key!r}]" if plain else f"{self.path}[a {type(key).__name__}]"

    def key(self, index: int) -> tuple[int, Any]:
        """By key; a key itself by its index."""
        keys = list(dict.keys(self.base))
        valued = index % 2 == 1 and index // 2 < len(keys)
        return (id(self.base), keys[index // 2] if valued else (index, "no value"))

    def select(self, index: int) -> Source | None:
        """The value of one item; a key cannot be replaced."""
        key = list(dict.keys(self.base))[index // 2]
        return Names(self.base, (key,), "") if index % 2 else None

    def restore(self, values: Sequence[Any]) -> None:
        """Put back the items, in their order."""
        if not are_identical(self.read(), values):
            self.base.clear()
            for key, value in zip(values[::2], values[1::2], strict=True):
                dict.__setitem__(self.base, key, value)


class Elements(Source):
    """All elements of a list or deque."""

    __slots__ = ()

    def name(self, index: int) -> str:
        """The list with the index in brackets."""
        return f"{self.path}[{index}]"

    def select(self, index: int) -> Source:
        """One of the elements."""
        return SingleElement(self.base, index, self.path)

    def restore(self, values: Sequence[Any]) -> None:
        """Put back the elements."""
        if not are_identical(self.read(), values):
            self.base.clear()
            self.base.extend(values)


class SingleElement(Source):
    """One element of a list or deque.

    Args:
        base: the list.
        index: its index.
        path: of the list.
    """

    __slots__ = ("_index",)

    def __init__(self, base: Any, index: int, path: str):
        """See the class."""
        super().__init__(base, path)
        self._index = index

    def read(self) -> list[Any]:
        """The element; `MISSING` if the list became shorter."""
        return [self.base[self._index] if self._index < len(self.base) else MISSING]

    def restore(self, values: Sequence[Any]) -> None:
        """Replace it."""
        (self.base[self._index],) = values


class Members(Source):
    """All members of a set."""

    __slots__ = ()

    def restore(self, values: Sequence[Any]) -> None:
        """Put back the members."""
        if not are_identical(self.read(), values):
            self.base.clear()
            self.base.update(values)


class Count(Names):
    """A whole number that a step counts up, read as a float: a symbol's arithmetic is of floats.

    >>> state = {"step": 2}
    >>> count = Count(state, ("step",), "state.")
    >>> count.read()
    [2.0]
    >>> count.restore([3.0])
    >>> state
    {'step': 3}
    """

    __slots__ = ()

    def read(self) -> list[Any]:
        """See `Names`."""
        return [float(value) if type(value) is int else value for value in super().read()]

    def put(self, index: int, value: Any) -> None:
        """See `Names`."""
        super().put(index, int(value) if type(value) is float else value)

    def select(self, index: int) -> Source | None:
        """Itself: there is one."""
        return self


class Cell(Source):
    """The variable in a closure's cell."""

    __slots__ = ()

    def read(self) -> list[Any]:
        """Its value; `MISSING` if it has none."""
        try:
            return [self.base.cell_contents]
        except ValueError:
            return [MISSING]

    def select(self, index: int) -> Source:
        """Itself."""
        return self

    def restore(self, values: Sequence[Any]) -> None:
        """Set or delete the variable."""
        (value,) = values
        if self.read()[0] is value:
            return
        if value is MISSING:
            del self.base.cell_contents
        else:
            self.base.cell_contents = value


class InstanceTypes(Source):
    """The classes of objects."""

    __slots__ = ()

    def read(self) -> list[Any]:
        """The class of each."""
        return list(map(type, self.base))

    def name(self, index: int) -> str:
        """The class by the attribute that gives it."""
        return f"__class__ of one {type(self.base[index]).__qualname__}"


class Namespaces(Source):
    """The `__dict__` of objects, which a program may replace by another one."""

    __slots__ = ()

    def read(self) -> list[Any]:
        """The namespace of each."""
        return [instance.__dict__ for instance in self.base]

    def name(self, index: int) -> str:
        """An object by its class."""
        return f"__dict__ of one {type(self.base[index]).__qualname__}"

    def restore(self, values: Sequence[Any]) -> None:
        """Put back the namespace of each."""
        for instance, before in zip(self.base, values, strict=True):
            if instance.__dict__ is not before:
                object.__setattr__(instance, "__dict__", before)  # its class may define __setattr__


class CallResult(Source):
    """The result of a call without arguments: of a weak reference, of a context variable."""

    __slots__ = ()

    def read(self) -> list[Any]:
        """The current result; `MISSING` if it raises `LookupError`."""
        try:
            return [self.base()]
        except LookupError:
            return [MISSING]


class ArrayBytes(Source):
    """The elements of a NumPy array."""

    __slots__ = ()

    def read(self) -> list[Any]:
        """Shape, dtype and bytes; of an array of objects, the objects."""
        array: np.ndarray = self.base
        if array.dtype.hasobject:
            return [array.shape, *array.ravel().tolist()]
        return [array.shape, array.dtype, array.tobytes()]


def are_identical(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """Whether two sequences have identical elements."""
    return len(left) == len(right) and all(a is b for a, b in zip(left, right, strict=True))
