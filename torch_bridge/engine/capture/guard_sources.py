"""Where Python keeps the values that a step reads: attributes, globals, items, cells.

A *holder* is one such place with one or more values: the attributes of an object that some code
names, all items of a dictionary, the contents of a closure's cell. `read` gives its present values,
`put_back` restores earlier ones, `name` says how a program would write one.

>>> class Trainer: ...
>>> trainer = Trainer()
>>> trainer.beta = 0.5
>>> holder = Names(vars(trainer), ("beta", "gamma"), "trainer.")
>>> holder.read(), holder.name(1)
([0.5, MISSING], 'trainer.gamma')
>>> trainer.beta = trainer.gamma = 3
>>> holder.put_back([0.5, MISSING])
>>> vars(trainer)
{'beta': 0.5}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np


class _Missing:
    """Stands for a value that is not there."""

    def __repr__(self) -> str:
        return "MISSING"


MISSING: Any = _Missing()


class Holder:
    """One place that holds values.

    Args:
        thing: what holds them.
        path: how a program would write it, for messages.
    """

    __slots__ = ("path", "thing")

    def __init__(self, thing: Any, path: str):
        """See the class."""
        self.thing = thing
        self.path = path

    def read(self) -> list[Any]:
        """The present values."""
        return list(self.thing)

    def name(self, number: int) -> str:
        """How a program would write the value that `read` gives at a place."""
        return self.path

    def put_back(self, values: Sequence[Any]) -> None:
        """Let it hold the values that `read` gave before."""

    def address(self, number: int) -> tuple[int, Any]:
        """The same for two holders of the same value."""
        return (id(self.thing), number)

    def single(self, number: int) -> Holder | None:
        """One of the values as a holder of its own, if it can be replaced."""
        return None


class _Named(Holder):
    __slots__ = ("keys",)

    def __init__(self, thing: Any, keys: Sequence[str], path: str):
        super().__init__(thing, path)
        self.keys = tuple(keys)

    def name(self, number: int) -> str:
        """The name behind what stands before it."""
        return f"{self.path}{self.keys[number]}"

    def address(self, number: int) -> tuple[int, Any]:
        """By name."""
        return (id(self.thing), self.keys[number])

    def put(self, number: int, value: Any) -> None:
        """Replace one value."""

    def put_back(self, values: Sequence[Any]) -> None:
        """Set and delete the names that have another value."""
        for number, (now, before) in enumerate(zip(self.read(), values, strict=True)):
            if now is not before:
                self.put(number, before)


def _none(key: str) -> bool:
    return False


class Names(_Named):
    """Some names of a namespace: attributes of an object or a class, globals of a module.

    Args:
        thing: the namespace.
        keys: which names.
        path: what stands before a name, for messages.
        owner: the class whose namespace it is, if it is a class's.
        awaited: whether a name that is not there yet would count.
        absent: the names that would, where they are few.
    """

    __slots__ = ("absent", "awaited", "owner")

    def __init__(
        self,
        thing: Mapping[str, Any],
        keys: Sequence[str],
        path: str,
        owner: type | None = None,
        awaited: Callable[[str], bool] = _none,
        absent: tuple[str, ...] = (),
    ):
        """See the class."""
        super().__init__(thing, keys, path)
        self.owner = owner
        self.awaited = awaited
        self.absent = absent

    def address(self, number: int) -> tuple[int, Any]:
        """By name; the namespace of a class is another object each time."""
        return (id(self.thing if self.owner is None else self.owner), self.keys[number])

    def added(self) -> list[str]:
        """Names that are there by now, and count."""
        known = set(self.keys)
        return [key for key in self.thing if key not in known and self.awaited(key)]

    def put_back(self, values: Sequence[Any]) -> None:
        """Set and delete the names that have another value, and delete those added."""
        super().put_back(values)
        for key in self.added():
            if self.owner is None:
                self.thing.pop(key, None)
            else:
                delattr(self.owner, key)

    def read(self) -> list[Any]:
        """The value of each name, or `MISSING`."""
        get = self.thing.get
        return [get(key, MISSING) for key in self.keys]

    def single(self, number: int) -> Holder:
        """One of the names."""
        return Names(self.thing, self.keys[number : number + 1], self.path, self.owner)

    def put(self, number: int, value: Any) -> None:
        """Set or delete the name."""
        key = self.keys[number]
        if self.owner is None and value is MISSING:
            self.thing.pop(key, None)
        elif self.owner is None:
            self.thing[key] = value
        elif value is MISSING:
            delattr(self.owner, key)
        else:
            setattr(self.owner, key, value)


class Fields(_Named):
    """Attributes that C keeps: `__slots__`, what a function or a `functools.partial` consists of.

    Args:
        thing: the object.
        keys: names of the attributes.
        path: what stands before a name, for messages.
    """

    __slots__ = ()

    def read(self) -> list[Any]:
        """The value of each attribute, or `MISSING`."""
        return [getattr(self.thing, key, MISSING) for key in self.keys]

    def single(self, number: int) -> Holder:
        """One of the attributes."""
        return Fields(self.thing, self.keys[number : number + 1], self.path)

    def put(self, number: int, value: Any) -> None:
        """Set or delete the attribute."""
        if value is MISSING:
            delattr(self.thing, self.keys[number])
        else:
            setattr(self.thing, self.keys[number], value)


class Items(Holder):
    """All items of a dictionary, in order: key, value, key, value, .."""

    __slots__ = ()

    def read(self) -> list[Any]:
        """Keys and values."""
        found: list[Any] = []
        for pair in dict.items(self.thing):
            found += pair
        return found

    def name(self, number: int) -> str:
        """The dictionary with the key in brackets."""
        keys = list(dict.keys(self.thing))
        if number // 2 >= len(keys):
            return self.path
        key = keys[number // 2]
        if self.path.endswith("."):  # a table of a module's
            return f"{self.path}{key}"
        plain = isinstance(key, str | int | float | bool | None)
        return f"{self.path}[{key!r}]" if plain else f"{self.path}[a {type(key).__name__}]"

    def address(self, number: int) -> tuple[int, Any]:
        """By key; a key itself by its place."""
        keys = list(dict.keys(self.thing))
        valued = number % 2 == 1 and number // 2 < len(keys)
        return (id(self.thing), keys[number // 2] if valued else (number, "no value"))

    def single(self, number: int) -> Holder | None:
        """The value of one item; a key cannot be replaced."""
        key = list(dict.keys(self.thing))[number // 2]
        return Names(self.thing, (key,), "") if number % 2 else None

    def put_back(self, values: Sequence[Any]) -> None:
        """Let it have the items that it had, in their order."""
        if not are_the_same(self.read(), values):
            self.thing.clear()
            for key, value in zip(values[::2], values[1::2], strict=True):
                dict.__setitem__(self.thing, key, value)


class Elements(Holder):
    """All elements of a list or deque."""

    __slots__ = ()

    def name(self, number: int) -> str:
        """The list with the index in brackets."""
        return f"{self.path}[{number}]"

    def single(self, number: int) -> Holder:
        """One of the elements."""
        return SingleElement(self.thing, number, self.path)

    def put_back(self, values: Sequence[Any]) -> None:
        """Let it have the elements that it had."""
        if not are_the_same(self.read(), values):
            self.thing.clear()
            self.thing.extend(values)


class SingleElement(Holder):
    """One element of a list or deque.

    Args:
        thing: the list.
        number: its index.
        path: of the list.
    """

    __slots__ = ("_number",)

    def __init__(self, thing: Any, number: int, path: str):
        """See the class."""
        super().__init__(thing, path)
        self._number = number

    def read(self) -> list[Any]:
        """The element; `MISSING` if the list is shorter by now."""
        return [self.thing[self._number] if self._number < len(self.thing) else MISSING]

    def put_back(self, values: Sequence[Any]) -> None:
        """Replace it."""
        (self.thing[self._number],) = values


class Members(Holder):
    """All members of a set."""

    __slots__ = ()

    def put_back(self, values: Sequence[Any]) -> None:
        """Let it have the members that it had."""
        if not are_the_same(self.read(), values):
            self.thing.clear()
            self.thing.update(values)


class Cell(Holder):
    """The variable that a closure's cell holds."""

    __slots__ = ()

    def read(self) -> list[Any]:
        """Its value; `MISSING` while it has none."""
        try:
            return [self.thing.cell_contents]
        except ValueError:
            return [MISSING]

    def single(self, number: int) -> Holder:
        """Itself."""
        return self

    def put_back(self, values: Sequence[Any]) -> None:
        """Give the variable the value that it had."""
        (value,) = values
        if self.read()[0] is value:
            return
        if value is MISSING:
            del self.thing.cell_contents
        else:
            self.thing.cell_contents = value


class Kinds(Holder):
    """The classes of objects."""

    __slots__ = ()

    def read(self) -> list[Any]:
        """The class of each."""
        return list(map(type, self.thing))

    def name(self, number: int) -> str:
        """The class by the attribute that gives it."""
        return f"__class__ of one {type(self.thing[number]).__qualname__}"


class Namespaces(Holder):
    """The `__dict__` of objects, which a program may replace by another one."""

    __slots__ = ()

    def read(self) -> list[Any]:
        """The namespace of each."""
        return [thing.__dict__ for thing in self.thing]

    def name(self, number: int) -> str:
        """The object by its class."""
        return f"__dict__ of one {type(self.thing[number]).__qualname__}"

    def put_back(self, values: Sequence[Any]) -> None:
        """Give each the namespace that it had."""
        for thing, before in zip(self.thing, values, strict=True):
            if thing.__dict__ is not before:
                object.__setattr__(thing, "__dict__", before)  # its class may refuse


class Asked(Holder):
    """What a call without arguments gives: of a weak reference, of a context variable."""

    __slots__ = ()

    def read(self) -> list[Any]:
        """What the call gives now; `MISSING` if it raises `LookupError`."""
        try:
            return [self.thing()]
        except LookupError:
            return [MISSING]


class ArrayBytes(Holder):
    """The elements of a NumPy array."""

    __slots__ = ()

    def read(self) -> list[Any]:
        """Shape, dtype and bytes; of an array of objects, the objects."""
        array: np.ndarray = self.thing
        if array.dtype.hasobject:
            return [array.shape, *array.ravel().tolist()]
        return [array.shape, array.dtype, array.tobytes()]


def are_the_same(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """Whether two sequences hold the same objects."""
    return len(left) == len(right) and all(a is b for a, b in zip(left, right, strict=True))
