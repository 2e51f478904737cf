"""Changes of containers that a step reads from."""

from __future__ import annotations

import array
import collections
from typing import Any

import torch

from tests.torch_bridge.engine.capture.changes.objects import KINDS, Box, pair
from tests.torch_bridge.engine.capture.changes.worlds import BY_DYNAMO, World, both, reads


def _puts(holder: Any, key: Any) -> Any:
    def put(value: Any) -> None:
        holder[key] = value

    return put


@reads("an item of a dict", "warmth", over=KINDS)
def dict_item(device: str, kind: str) -> World:
    first, second = pair(kind, device)
    table = {"warmth": first}
    return World(lambda x: x * table["warmth"], *both(_puts(table, "warmth"), first, second))


@reads("an item of a dict by a computed key", "warmth", "table", over=KINDS)
def dict_computed(device: str, kind: str) -> World:
    first, second = pair(kind, device)
    table, parts = {"warmth": first}, ("war", "mth")
    return World(lambda x: x * table["".join(parts)], *both(_puts(table, "warmth"), first, second))


@reads("an item of a dict by get", "warmth", "table")
def dict_get(device: str) -> World:
    table: dict[str, float] = {}
    return World(
        lambda x: x * table.get("warmth", 2.0),
        lambda: table.update(warmth=5.0),
        lambda: table.clear(),
    )


@reads("whether a key is in a dict", "warmth", "table")
def dict_contains(device: str) -> World:
    table: dict[str, int] = {}
    return World(
        lambda x: x if "warmth" in table else -x,
        lambda: table.update(warmth=1),
        lambda: table.clear(),
    )


@reads("what is added to a dict that is iterated", "warmth", "table", over=KINDS)
def dict_added(device: str, kind: str) -> World:
    first, second = pair(kind, device)
    table = {"cold": first}

    def read(x: torch.Tensor) -> torch.Tensor:
        for value in table.values():
            x = x * value
        return x

    return World(read, lambda: table.update(warmth=second), lambda: table.pop("warmth"))


@reads("the order of a dict", "table")
def dict_order(device: str) -> World:
    table = {"add": 1.0, "multiply": 2.0}

    def read(x: torch.Tensor) -> torch.Tensor:
        for name, value in table.items():
            x = x + value if name == "add" else x * value
        return x

    def turn() -> None:
        first = next(iter(table))
        table[first] = table.pop(first)

    return World(read, turn, turn)


@reads("which item a string names", "current", "table")
def dict_current(device: str) -> World:
    table = {"a": torch.nn.ReLU(), "b": torch.nn.Tanh(), "current": "a"}

    def read(x: torch.Tensor) -> torch.Tensor:
        chosen: Any = table[table["current"]]
        return chosen(x)

    return World(read, *both(_puts(table, "current"), "a", "b"))


@reads("an item of a dict in a dict in a list", "warmth", "table")
def nested_item(device: str) -> World:
    table = [{"inner": {"warmth": [2.0]}}]
    return World(
        lambda x: x * table[0]["inner"]["warmth"][0],
        *both(_puts(table[0]["inner"]["warmth"], 0), 2.0, 5.0),
    )


@reads("a default dict", "warmth", "table")
def default_dict(device: str) -> World:
    table: Any = collections.defaultdict(lambda: 2.0)
    return World(lambda x: x * table["warmth"], *both(_puts(table, "warmth"), 2.0, 5.0))


@reads("a chain map", "warmth", "table", "maps", frozen=BY_DYNAMO)
def chain_map(device: str) -> World:
    own: dict[str, float] = {}
    table = collections.ChainMap(own, {"warmth": 2.0})
    return World(lambda x: x * table["warmth"], *both(_puts(own, "warmth"), 2.0, 5.0))


@reads("an item of an ordered dict", "warmth", "table")
def ordered_dict(device: str) -> World:
    table = collections.OrderedDict(warmth=2.0)
    return World(lambda x: x * table["warmth"], *both(_puts(table, "warmth"), 2.0, 5.0))


@reads("an item of a list", "factors", over=KINDS)
def list_item(device: str, kind: str) -> World:
    first, second = pair(kind, device)
    factors = [1.0, first]
    return World(lambda x: x * factors[1], *both(_puts(factors, 1), first, second))


@reads("what is appended to a list", "factors", over=KINDS)
def list_appended(device: str, kind: str) -> World:
    first, second = pair(kind, device)
    factors = [first]

    def read(x: torch.Tensor) -> torch.Tensor:
        for factor in factors:
            x = x * factor
        return x

    return World(read, lambda: factors.append(second), factors.pop)


@reads("the length of a list", "factors")
def list_length(device: str) -> World:
    factors = [0, 0]
    return World(lambda x: x * len(factors), lambda: factors.append(0), factors.pop)


@reads("the order of a list", "factors")
def list_order(device: str) -> World:
    factors = [2.0, 5.0]
    return World(lambda x: x * factors[0] + factors[1], factors.reverse, factors.reverse)


@reads("the sum of a list", "factors")
def list_sum(device: str) -> World:
    factors = [2.0, 5.0]
    return World(lambda x: x * sum(factors), *both(_puts(factors, 1), 5.0, 7.0))


@reads("a list emptied that the step asks for", "factors")
def list_truth(device: str) -> World:
    factors = [2.0]
    return World(
        lambda x: x * factors[0] if factors else -x, factors.clear, lambda: factors.append(2.0)
    )


@reads("a comprehension over a list", "factors")
def comprehension(device: str) -> World:
    factors = [2.0, 5.0]
    return World(
        lambda x: torch.stack([x * one for one in factors]).sum(0),
        *both(_puts(factors, 0), 2.0, 7.0),
    )


@reads("a tuple replaced", "factors", over=KINDS)
def tuple_replaced(device: str, kind: str) -> World:
    first, second = pair(kind, device)
    holder = Box(factors=(first, 1))
    return World(
        lambda x: x * holder.factors[0],
        *both(lambda v: setattr(holder, "factors", (v, 1)), first, second),
    )


@reads("a list in a tuple", "factors")
def list_in_tuple(device: str) -> World:
    factors = ([2.0], 1)
    return World(lambda x: x * factors[0][0], *both(_puts(factors[0], 0), 2.0, 5.0))


@reads("the elements of a set", "chosen")
def set_elements(device: str) -> World:
    chosen = {"relu"}

    def put(name: str) -> None:
        chosen.clear()
        chosen.add(name)

    return World(
        lambda x: torch.relu(x) if "relu" in chosen else torch.tanh(x), *both(put, "relu", "tanh")
    )


@reads("an item of a deque", "window", over=KINDS)
def deque_item(device: str, kind: str) -> World:
    first, second = pair(kind, device)
    window = collections.deque([first], maxlen=1)
    return World(lambda x: x * window[0], *both(window.append, first, second))


@reads("the sum of a deque", "window", over=KINDS)
def deque_sum(device: str, kind: str) -> World:
    first, second = pair(kind, device)
    window = collections.deque([first, first], maxlen=2)
    return World(lambda x: x * sum(window), *both(window.append, first, second))


@reads("an element of array.array", "numbers", "array")
def typed_array(device: str) -> World:
    numbers = array.array("d", [2.0])
    return World(lambda x: x * numbers[0], *both(_puts(numbers, 0), 2.0, 5.0))


@reads("a byte of a bytearray", "raw", "bytearray")
def byte(device: str) -> World:
    raw = bytearray([2])
    return World(lambda x: x * raw[0], *both(_puts(raw, 0), 2, 5))


class Table(dict):
    """A dict with attributes."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Numbers(list):
    """A list with a method."""

    def first(self) -> float:
        return self[0]


@reads("a subclass of dict read by attribute", "warmth", "table")
def dict_subclass(device: str) -> World:
    table = Table(warmth=2.0)
    return World(lambda x: x * table.warmth, *both(_puts(table, "warmth"), 2.0, 5.0))


@reads("a subclass of list read by a method", "numbers")
def list_subclass(device: str) -> World:
    numbers = Numbers([2.0])
    return World(lambda x: x * numbers.first(), *both(_puts(numbers, 0), 2.0, 5.0))


@reads("an attribute of a subclass of dict", "warmth", "table", frozen=BY_DYNAMO)
def attribute_of_dict(device: str) -> World:
    table = Table()
    table.__dict__["extra"] = 2.0
    return World(lambda x: x * table.extra, *both(lambda v: vars(table).update(extra=v), 2.0, 5.0))
