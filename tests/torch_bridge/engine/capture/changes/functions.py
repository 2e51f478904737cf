"""Changes of what functions hold: cells, defaults, globals, code, arguments, caches."""

from __future__ import annotations

import builtins
import functools
import importlib
from collections.abc import Iterator
from typing import Any

import torch

from tests.torch_bridge.engine.capture.changes import elsewhere
from tests.torch_bridge.engine.capture.changes.objects import KINDS, Box, pair, used
from tests.torch_bridge.engine.capture.changes.worlds import BY_DYNAMO, World, both, reads


@reads("a closure cell", "warmth", over=KINDS)
def closure_cell(device: str, kind: str) -> World:
    first, second = pair(kind, device)
    warmth = first

    def put(value: Any) -> None:
        nonlocal warmth
        warmth = value

    return World(lambda x: x * warmth, *both(put, first, second))


@reads("a closure cell of a called function", "warmth")
def inner_closure_cell(device: str) -> World:
    warmth = 2.0

    def helper(x: torch.Tensor) -> torch.Tensor:
        return x * warmth

    def put(value: float) -> None:
        nonlocal warmth
        warmth = value

    return World(lambda x: helper(x) + 1, *both(put, 2.0, 5.0))


@reads("a default argument", "warmth", "__defaults__", over=KINDS)
def default_argument(device: str, kind: str) -> World:
    first, second = pair(kind, device)

    def read(x: torch.Tensor, warmth: Any = first) -> torch.Tensor:
        return x * warmth

    def put(value: Any) -> None:
        read.__defaults__ = (value,)

    return World(read, *both(put, first, second))


@reads("a default argument of a called function", "warmth", "__defaults__")
def helper_default(device: str) -> World:
    def helper(x: torch.Tensor, warmth: float = 2.0) -> torch.Tensor:
        return x * warmth

    def put(value: float) -> None:
        helper.__defaults__ = (value,)

    return World(lambda x: helper(x), *both(put, 2.0, 5.0))


@reads("a default keyword argument", "warmth", "__kwdefaults__", over=KINDS)
def keyword_default(device: str, kind: str) -> World:
    first, second = pair(kind, device)

    def read(x: torch.Tensor, *, warmth: Any = first) -> torch.Tensor:
        return x * warmth

    def put(value: Any) -> None:
        read.__kwdefaults__ = {"warmth": value}

    return World(read, *both(put, first, second))


@reads("a mutable default argument", "table", "warmth")
def mutable_default(device: str) -> World:
    table = {"warmth": 2.0}

    def read(x: torch.Tensor, table: dict[str, float] = table) -> torch.Tensor:
        return x * table["warmth"]

    return World(read, *both(lambda v: table.update(warmth=v), 2.0, 5.0))


@reads("an attribute of a function", "warmth")
def function_attribute(device: str) -> World:
    def read(x: torch.Tensor) -> torch.Tensor:
        return x * counted.warmth

    counted: Any = read
    counted.warmth = 2.0
    return World(read, *both(lambda v: setattr(counted, "warmth", v), 2.0, 5.0))


@reads("the code of a function", "helper", "__code__")
def function_code(device: str) -> World:
    def helper(x: torch.Tensor) -> torch.Tensor:
        return x * 2.0

    def other(x: torch.Tensor) -> torch.Tensor:
        return x * 5.0

    first = helper.__code__

    def put(code: Any) -> None:
        helper.__code__ = code

    return World(lambda x: helper(x), *both(put, first, other.__code__))


@reads("a keyword of functools.partial", "warmth", "keywords", "partial")
def partial_keyword(device: str) -> World:
    def scaled(x: torch.Tensor, warmth: float) -> torch.Tensor:
        return x * warmth

    part = functools.partial(scaled, warmth=2.0)
    return World(part, *both(lambda v: part.keywords.update(warmth=v), 2.0, 5.0))


@reads("a partial replaced", "part", "partial")
def partial_replaced(device: str) -> World:
    holder = Box(part=functools.partial(torch.mul, 2.0 * torch.ones(4, 4, device=device)))
    first = holder.part
    second = functools.partial(torch.mul, 5.0 * torch.ones(4, 4, device=device))
    return World(
        lambda x: holder.part(x), *both(lambda v: setattr(holder, "part", v), first, second)
    )


WARMTH: Any = 2.0
SCHEDULE = {"warmth": 2.0}


def _put_global(name: str) -> Any:
    return lambda value: globals().__setitem__(name, value)


@reads("a global of the step's module", "WARMTH", over=KINDS)
def own_global(device: str, kind: str) -> World:
    first, second = pair(kind, device)
    put = _put_global("WARMTH")
    put(first)
    return World(lambda x: x * WARMTH, *both(put, first, second))


def _helper(x: torch.Tensor) -> torch.Tensor:
    return x * WARMTH


@reads("a global that a called function reads", "WARMTH", over=KINDS)
def helpers_global(device: str, kind: str) -> World:
    first, second = pair(kind, device)
    put = _put_global("WARMTH")
    put(first)
    return World(lambda x: _helper(x) + 1, *both(put, first, second))


@reads("an item of a global dict", "SCHEDULE", "warmth")
def global_dict(device: str) -> World:
    SCHEDULE["warmth"] = 2.0
    return World(
        lambda x: x * SCHEDULE["warmth"], *both(lambda v: SCHEDULE.update(warmth=v), 2.0, 5.0)
    )


@reads("a global by globals()", "WARMTH", "globals")
def by_globals(device: str) -> World:
    put = _put_global("WARMTH")
    put(2.0)
    return World(lambda x: x * globals()["WARM" + "TH"], *both(put, 2.0, 5.0))


@reads("a global function replaced", "_helper")
def global_function(device: str) -> World:
    _put_global("WARMTH")(2.0)
    put, first = _put_global("_helper"), _helper
    return World(lambda x: _helper(x), *both(put, first, lambda x: -x))


def _put_elsewhere(name: str) -> Any:
    return lambda value: setattr(elsewhere, name, value)


@reads("a global of another module", "WARMTH")
def other_global(device: str) -> World:
    elsewhere.WARMTH = 2.0
    return World(lambda x: x * elsewhere.WARMTH, *both(_put_elsewhere("WARMTH"), 2.0, 5.0))


@reads("a global of another module that its function reads", "WARMTH")
def read_elsewhere(device: str) -> World:
    elsewhere.WARMTH = 2.0
    return World(elsewhere.scaled, *both(_put_elsewhere("WARMTH"), 2.0, 5.0))


@reads("a global of another module two calls away", "WARMTH")
def read_far_away(device: str) -> World:
    elsewhere.WARMTH = 2.0
    return World(lambda x: elsewhere.through_another(x), *both(_put_elsewhere("WARMTH"), 2.0, 5.0))


@reads("a tensor in another module", "TENSOR")
def tensor_elsewhere(device: str) -> World:
    first, second = pair("tensor", device)
    elsewhere.TENSOR = first
    return World(lambda x: elsewhere.shifted(x), *both(_put_elsewhere("TENSOR"), first, second))


@reads("an item of a dict in another module", "TABLE", "warmth")
def dict_elsewhere(device: str) -> World:
    elsewhere.TABLE["warmth"] = 2.0
    return World(
        lambda x: x * elsewhere.TABLE["warmth"],
        *both(lambda v: elsewhere.TABLE.update(warmth=v), 2.0, 5.0),
    )


@reads("a function of another module patched", "replaced")
def patched_elsewhere(device: str) -> World:
    first = elsewhere.replaced
    return World(
        lambda x: elsewhere.replaced(x), *both(_put_elsewhere("replaced"), first, torch.tanh)
    )


@reads("a module imported in the step", "WARMTH", "import")
def imported_in_the_step(device: str) -> World:
    elsewhere.WARMTH = 2.0

    def read(x: torch.Tensor) -> torch.Tensor:
        found: Any = importlib.import_module(elsewhere.__name__)
        return x * found.WARMTH

    return World(read, *both(_put_elsewhere("WARMTH"), 2.0, 5.0))


@reads("a builtin hidden by a global", "abs", frozen=BY_DYNAMO)
def builtin_hidden(device: str) -> World:
    def put(value: Any) -> None:
        if value is builtins.abs:
            globals().pop("abs", None)
        else:
            globals()["abs"] = value

    return World(lambda x: abs(x), *both(put, builtins.abs, torch.neg))


@reads("a function held by an object", "chosen")
def function_in_object(device: str) -> World:
    holder = Box(chosen=torch.relu)
    return World(
        lambda x: holder.chosen(x),
        *both(lambda v: setattr(holder, "chosen", v), torch.relu, torch.tanh),
    )


class Helping:
    def __init__(self):
        self.warmth = 2.0

    def method(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.warmth

    @classmethod
    def shared(cls, x: torch.Tensor) -> torch.Tensor:
        return x * 3.0

    @staticmethod
    def plain(x: torch.Tensor) -> torch.Tensor:
        return x * 4.0


@reads("the object of a bound method", "warmth")
def bound_method(device: str) -> World:
    helping = Helping()
    return World(helping.method, *both(lambda v: setattr(helping, "warmth", v), 2.0, 5.0))


@reads(
    "a method of a class patched",
    "method",
    "shared",
    "plain",
    over=("method", "plain"),
    frozen=BY_DYNAMO,
)
def method_patched(device: str, which: str) -> World:
    class Here(Helping):
        pass

    helping, first = Here(), Helping.__dict__[which]

    def second(*args: Any) -> torch.Tensor:
        return -args[-1]

    def read(x: torch.Tensor) -> torch.Tensor:
        return helping.method(x) + helping.plain(x)

    return World(
        read,
        lambda: setattr(Here, which, second if which == "method" else staticmethod(second)),
        lambda: setattr(Here, which, first),
    )


@reads("a method of one object patched", "method")
def instance_method_patched(device: str) -> World:
    helping: Any = Helping()
    return World(
        lambda x: helping.method(x),
        lambda: setattr(helping, "method", lambda x: -x),
        lambda: delattr(helping, "method"),
    )


# --- Arguments -----------------------------------------------------------------------------------


@reads("a number in an object given as an argument", "warmth", over=KINDS)
def object_argument(device: str, kind: str) -> World:
    first, second = pair(kind, device)
    given = Box2(first)
    return World(
        lambda x, one: x * one.warmth,
        *both(lambda v: setattr(given, "warmth", v), first, second),
        extra=lambda: (given,),
    )


class Box2:
    """Hashable, as arguments of compiled steps must be."""

    def __init__(self, warmth: Any):
        self.warmth = warmth


@reads("another object given as an argument", "warmth", over=KINDS)
def other_argument(device: str, kind: str) -> World:
    first, second = pair(kind, device)
    given = [Box2(first)]
    return World(
        lambda x, one: x * one.warmth,
        *both(lambda v: given.__setitem__(0, Box2(v)), first, second),
        extra=lambda: (given[0],),
    )


ARGUMENTS: dict[str, tuple[Any, Any]] = {
    "float": (2.0, 5.0),
    "int": (2, 5),
    "one and true": (1, True),
    "zero and minus zero": (0.0, -0.0),
}


@reads(
    "an argument of type", "given", "argument", over=ARGUMENTS, frozen_for=("zero and minus zero",)
)
def plain_argument(device: str, kind: str) -> World:
    first, second = ARGUMENTS[kind]
    given = [first]

    def read(x: torch.Tensor, value: Any) -> torch.Tensor:
        return used(x, value)

    return World(
        read, *both(lambda v: given.__setitem__(0, v), first, second), extra=lambda: (given[0],)
    )


# --- Recursion, generators, caches ---------------------------------------------------------------


@reads("the depth of a recursion", "depth")
def recursion(device: str) -> World:
    holder = Box(depth=2)

    def again(x: torch.Tensor, left: int) -> torch.Tensor:
        return x if left == 0 else again(x * 1.5, left - 1)

    return World(
        lambda x: again(x, holder.depth), *both(lambda v: setattr(holder, "depth", v), 2, 4)
    )


@reads("what a generator function reads", "warmth")
def generator_function(device: str) -> World:
    holder = Box(warmth=2.0)

    def factors() -> Iterator[float]:
        for number in range(2):
            yield holder.warmth + number

    def read(x: torch.Tensor) -> torch.Tensor:
        for factor in factors():
            x = x * factor
        return x

    return World(read, *both(lambda v: setattr(holder, "warmth", v), 2.0, 5.0))


@reads("what a cached function reads, and its cache cleared", "warmth", "cached", "lru_cache")
def cache_cleared(device: str) -> World:
    holder = Box(warmth=2.0)

    @functools.lru_cache
    def cached(number: int) -> float:
        return holder.warmth + number

    def put(value: float) -> None:
        holder.warmth = value
        cached.cache_clear()

    return World(lambda x: x * cached(1), *both(put, 2.0, 5.0))


@reads("what a decorated function reads", "warmth")
def decorated(device: str) -> World:
    holder = Box(warmth=2.0)

    def twice(function: Any) -> Any:
        @functools.wraps(function)
        def run(x: torch.Tensor) -> torch.Tensor:
            return function(function(x))

        return run

    @twice
    def read(x: torch.Tensor) -> torch.Tensor:
        return x * holder.warmth

    return World(read, *both(lambda v: setattr(holder, "warmth", v), 2.0, 5.0))


@reads("what a callback in sorted reads", "weights")
def callback(device: str) -> World:
    weights = {"relu": 1.0, "tanh": 2.0}

    def read(x: torch.Tensor) -> torch.Tensor:
        first = sorted(weights, key=lambda name: weights[name])[0]
        return torch.relu(x) if first == "relu" else torch.tanh(x)

    return World(read, *both(lambda v: weights.update(tanh=v), 2.0, 0.5))


@reads("what an autograd function reads", "warmth")
def autograd_function(device: str) -> World:
    holder = Box(warmth=2.0)

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * holder.warmth

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0] * holder.warmth

    def read(x: torch.Tensor) -> torch.Tensor:
        result: Any = Scaled.apply(x)
        return result

    return World(read, *both(lambda v: setattr(holder, "warmth", v), 2.0, 5.0))


@reads("what the backward of an autograd function reads", "warmth", "gradient")
def autograd_backward(device: str) -> World:
    holder = Box(warmth=2.0)
    weight = torch.ones(4, 4, device=device, requires_grad=True)

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1.0

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0] * holder.warmth

    def step(x: torch.Tensor) -> torch.Tensor:
        result: Any = Scaled.apply(x * weight)
        if torch.is_grad_enabled():
            (gradient,) = torch.autograd.grad(result.sum(), weight, retain_graph=True)
            return result + gradient
        return result

    return World(step, *both(lambda v: setattr(holder, "warmth", v), 2.0, 5.0))


@reads("what a with statement enters", "warmth")
def context_manager(device: str) -> World:
    class Scale:
        def __init__(self):
            self.warmth = 2.0

        def __enter__(self) -> float:
            return self.warmth

        def __exit__(self, *exc: object) -> None:
            pass

    scale = Scale()

    def read(x: torch.Tensor) -> torch.Tensor:
        with scale as factor:
            return x * factor

    return World(read, *both(lambda v: setattr(scale, "warmth", v), 2.0, 5.0))
