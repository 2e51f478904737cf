"""Changes of objects that a step reads numbers, flags and tensors from."""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import enum
import functools
import math
import threading
import types
import weakref
from typing import Any, ClassVar

import numpy as np
import torch

from tests.torch_bridge.engine.capture.changes.worlds import World, both, reads

Box = types.SimpleNamespace

NUMBER, TENSOR = "number", "tensor"
KINDS = (NUMBER, TENSOR)


def pair(kind: str, device: str) -> tuple[Any, Any]:
    """What is read before and after the edit."""
    if kind == NUMBER:
        return 2.0, 5.0
    return torch.tensor(2.0, device=device), torch.tensor(5.0, device=device)


# --- Attributes, at each depth -------------------------------------------------------------------

PATHS = [
    lambda a, x: x * a.warmth,
    lambda a, x: x * a.b.warmth,
    lambda a, x: x * a.b.c.warmth,
    lambda a, x: x * a.b.c.d.warmth,
    lambda a, x: x * a.b.c.d.e.warmth,
    lambda a, x: x * a.b.c.d.e.f.warmth,
    lambda a, x: x * a.b.c.d.e.f.g.warmth,
    lambda a, x: x * a.b.c.d.e.f.g.h.warmth,
]


def nested(depth: int, leaf: Any) -> tuple[Any, Any]:
    """The outermost object, and the innermost, whose `warmth` is `leaf`."""
    outer = inner = Box(warmth=leaf)
    for name in "hgfedcb"[8 - depth :]:
        outer = Box(**{name: outer})
    return outer, inner


@reads("an attribute at depth", "warmth", over=range(1, 9))
def attribute(device: str, depth: int) -> World:
    a, inner = nested(depth, 2.0)
    return World(lambda x: PATHS[depth - 1](a, x), *both(_sets(inner), 2.0, 5.0))


@reads("a tensor attribute at depth", "warmth", over=(1, 4, 6, 8))
def tensor_attribute(device: str, depth: int) -> World:
    first, second = pair(TENSOR, device)
    a, inner = nested(depth, first)
    return World(lambda x: PATHS[depth - 1](a, x), *both(_sets(inner), first, second))


def _sets(holder: Any, name: str = "warmth") -> Any:
    return lambda value: setattr(holder, name, value)


@reads("an object replaced in the middle of the path", "warmth", "d")
def object_replaced(device: str) -> World:
    a, _ = nested(6, 2.0)
    old, new = a.b.c.d, Box(e=Box(f=Box(warmth=5.0)))
    return World(lambda x: PATHS[5](a, x), *both(_sets(a.b.c, "d"), old, new))


@reads("the namespace of an object replaced", "warmth", "__dict__")
def namespace_replaced(device: str) -> World:
    class Warm:
        pass

    a = Warm()
    edit, back = both(_sets(a, "__dict__"), {"warmth": 2.0}, {"warmth": 5.0})
    back()
    return World(lambda x: x * a.warmth, edit, back)


@reads("an item of the namespace that a function returns", "warmth")
def namespace_returned(device: str) -> World:
    a = Box(warmth=2.0)
    whole = lambda holder: holder.__dict__  # noqa: E731
    return World(lambda x: x * whole(a)["warmth"], *both(_sets(a), 2.0, 5.0))


@reads("an attribute that a tensor is given", "heated")
def attribute_of_a_tensor(device: str) -> World:
    scale = torch.tensor(2.0, device=device)

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * scale if getattr(scale, "heated", False) else x + scale

    return World(step, lambda: setattr(scale, "heated", True), lambda: delattr(scale, "heated"))


class Level(enum.Enum):
    LOW = 2.0
    HIGH = 5.0


VALUES: dict[str, tuple[Any, Any]] = {
    "float": (2.0, 5.0),
    "int": (2, 5),
    "bool": (True, False),
    "one and true": (1, True),
    "one and one point zero": (1, 1.0),
    "zero and minus zero": (0.0, -0.0),
    "nan": (1.0, math.nan),
    "infinity": (1.0, math.inf),
    "string": ("relu", "tanh"),
    "None": (None, 3.0),
    "enum": (Level.LOW, Level.HIGH),
    "numpy float32": (np.float32(2), np.float32(5)),
    "numpy float64": (np.float64(2), np.float64(5)),
    "numpy int64": (np.int64(2), np.int64(5)),
    "numpy bool": (np.bool_(True), np.bool_(False)),
    "tuple": ((2.0, 3), (5.0, 7)),
    "frozenset": (frozenset({2}), frozenset({5})),
    "bytes": (b"\x02", b"\x05"),
    "complex": (complex(2.0, 0.0), complex(5.0, 0.0)),
    "dtype": (torch.float32, torch.bfloat16),
    "slice": (slice(0, 2), slice(2, 4)),
    "function": (torch.relu, torch.tanh),
    "class": (torch.nn.ReLU, torch.nn.Tanh),
}


def used(x: torch.Tensor, value: Any) -> torch.Tensor:
    """Something that depends on the value, its type and its bits."""
    if isinstance(value, torch.dtype):
        return x.to(value).float()
    if isinstance(value, slice):
        return torch.cat([x[value], x[value]])
    if isinstance(value, str | bytes):
        return torch.relu(x) if value in ("relu", b"\x02") else torch.tanh(x)
    if value is None:
        return -x
    if isinstance(value, bool | np.bool_):
        return x + 1.5 if value else x - 1.5
    if isinstance(value, type):
        return value()(x)
    if callable(value):
        return value(x)
    if isinstance(value, tuple | frozenset):
        return x * sum(value)
    if isinstance(value, complex):
        return x * value.real
    if isinstance(value, enum.Enum):
        return x * value.value
    if value == 0:
        return 1 / (x * value)
    return x * value + torch.full((4, 4), value, device=x.device) + len(str(value))


@reads(
    "an attribute of type", "setting", over=VALUES, frozen_for=("zero and minus zero", "numpy bool")
)
def attribute_of_type(device: str, kind: str) -> World:
    first, second = VALUES[kind]
    holder = Box(setting=first)
    return World(lambda x: used(x, holder.setting), *both(_sets(holder, "setting"), first, second))


@reads("an attribute deleted", "warmth")
def attribute_deleted(device: str) -> World:
    holder = Box(warmth=2.0)

    def read(x: torch.Tensor) -> torch.Tensor:
        return x * holder.warmth if hasattr(holder, "warmth") else -x

    return World(read, lambda: delattr(holder, "warmth"), lambda: setattr(holder, "warmth", 2.0))


@reads("attribute with default by getattr", "warmth")
def attribute_with_default(device: str) -> World:
    holder = Box()

    def read(x: torch.Tensor) -> torch.Tensor:
        return x * getattr(holder, "warmth", 2.0)

    return World(read, lambda: setattr(holder, "warmth", 5.0), lambda: delattr(holder, "warmth"))


@reads("getattr with a computed name", "warmth", over=KINDS)
def computed_name(device: str, kind: str) -> World:
    first, second = pair(kind, device)
    holder, parts = Box(warmth=first), ("war", "mth")
    return World(lambda x: x * getattr(holder, "".join(parts)), *both(_sets(holder), first, second))


@reads("the computed name of getattr", "which", "warmth", "cold")
def name_of_attribute(device: str) -> World:
    holder = Box(warmth=2.0, cold=5.0, which="warmth")

    def read(x: torch.Tensor) -> torch.Tensor:
        return x * getattr(holder, holder.which)

    return World(read, *both(_sets(holder, "which"), "warmth", "cold"))


@reads("vars of an object", "warmth", "vars")
def all_attributes(device: str) -> World:
    holder = Box(warmth=2.0, cold=1.0)
    return World(lambda x: x * sum(vars(holder).values()), *both(_sets(holder), 2.0, 5.0))


@reads("vars of an object by a computed key", "warmth", "vars")
def one_of_vars(device: str) -> World:
    holder, key = Box(warmth=2.0), "WARMTH"
    return World(lambda x: x * vars(holder)[key.lower()], *both(_sets(holder), 2.0, 5.0))


@reads("attributes unpacked as keywords", "warmth", "vars")
def unpacked(device: str) -> World:
    holder = Box(warmth=2.0)

    def scaled(x: torch.Tensor, **factors: float) -> torch.Tensor:
        return x * math.prod(factors.values())

    return World(lambda x: scaled(x, **vars(holder)), *both(_sets(holder), 2.0, 5.0))


# --- Classes and what they define ----------------------------------------------------------------


@dataclasses.dataclass
class Settings:
    warmth: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    warmth: Any


Pair = collections.namedtuple("Pair", ["warmth", "cold"])


@reads("a dataclass field", "warmth", over=KINDS)
def dataclass_field(device: str, kind: str) -> World:
    first, second = pair(kind, device)
    settings = Settings(first)
    return World(lambda x: x * settings.warmth, *both(_sets(settings), first, second))


@reads("a frozen dataclass replaced", "warmth", "config")
def frozen_dataclass(device: str) -> World:
    holder = Box(config=Frozen(2.0))
    return World(
        lambda x: x * holder.config.warmth, *both(_sets(holder, "config"), Frozen(2.0), Frozen(5.0))
    )


@reads("a namedtuple replaced", "warmth", "config", over=KINDS)
def namedtuple_replaced(device: str, kind: str) -> World:
    first, second = pair(kind, device)
    holder = Box(config=Pair(first, 1))
    return World(
        lambda x: x * holder.config.warmth,
        *both(_sets(holder, "config"), Pair(first, 1), Pair(second, 1)),
    )


class WithProperty:
    def __init__(self, value: Any):
        self._kept = [value]

    @property
    def warmth(self) -> Any:
        return self._kept[0]


@reads("state behind a property", "_kept", "warmth", over=KINDS)
def behind_property(device: str, kind: str) -> World:
    first, second = pair(kind, device)
    holder = WithProperty(first)

    def put(value: Any) -> None:
        holder._kept[0] = value

    return World(lambda x: x * holder.warmth, *both(put, first, second))


class Cached:
    def __init__(self):
        self.base = 2.0

    @functools.cached_property
    def warmth(self) -> float:
        return self.base


@reads("a cached property cleared", "warmth", "base")
def cached_property(device: str) -> World:
    holder = Cached()

    def put(value: float) -> None:
        holder.base = value
        vars(holder).pop("warmth", None)

    return World(lambda x: x * holder.warmth, *both(put, 2.0, 5.0))


class Slotted:
    __slots__ = ("warmth",)

    def __init__(self, warmth: Any):
        self.warmth = warmth


@reads("a slot", "warmth", over=KINDS)
def slot(device: str, kind: str) -> World:
    first, second = pair(kind, device)
    holder = Slotted(first)
    return World(lambda x: x * holder.warmth, *both(_sets(holder), first, second))


class Base:
    warmth: ClassVar[Any] = 2.0


class Derived(Base):
    pass


@reads("a class attribute", "warmth", over=KINDS)
def class_attribute(device: str, kind: str) -> World:
    first, second = pair(kind, device)

    class Here:
        warmth = first

    holder = Here()
    return World(lambda x: x * holder.warmth, *both(_sets(Here), first, second))


@reads("an attribute of the base class", "warmth")
def base_attribute(device: str) -> World:
    holder = Derived()
    return World(lambda x: x * holder.warmth, *both(_sets(Base), 2.0, 5.0))


@reads("an attribute of the class, through the class", "warmth")
def class_itself(device: str) -> World:
    return World(lambda x: x * Derived.warmth, *both(_sets(Base), 2.0, 5.0))


@reads("an attribute that begins to hide that of the class", "warmth")
def hides_class(device: str) -> World:
    holder = Derived()
    return World(
        lambda x: x * holder.warmth, lambda: _sets(holder)(5.0), lambda: delattr(holder, "warmth")
    )


@reads("the class of an object", "__class__", "warmth")
def class_of(device: str) -> World:
    class One:
        warmth = 2.0

    class Two:
        warmth = 5.0

    holder = One()
    return World(lambda x: x * holder.warmth, *both(_sets(holder, "__class__"), One, Two))


class Proxy:
    """Attributes that are kept elsewhere."""

    def __init__(self, inner: Any):
        self.__dict__["_inner"] = inner

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["_inner"][name]


@reads("what __getattr__ finds", "warmth", "_inner", over=KINDS)
def by_getattr(device: str, kind: str) -> World:
    first, second = pair(kind, device)
    inner = {"warmth": first}
    proxy = Proxy(inner)
    return World(
        lambda x: x * proxy.warmth,
        *both(lambda value: inner.update(warmth=value), first, second),
    )


class Descriptor:
    def __get__(self, instance: Any, owner: Any = None) -> float:
        return instance.store["warmth"]


class Described:
    warmth = Descriptor()

    def __init__(self):
        self.store = {"warmth": 2.0}


@reads("what a descriptor finds", "warmth", "store")
def by_descriptor(device: str) -> World:
    holder = Described()
    return World(
        lambda x: x * holder.warmth, *both(lambda v: holder.store.update(warmth=v), 2.0, 5.0)
    )


class Comparing:
    """An object that is called, indexed, compared and measured."""

    def __init__(self):
        self.inside = 2.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.inside

    def __getitem__(self, key: int) -> float:
        return self.inside + key

    def __len__(self) -> int:
        return int(self.inside)

    def __bool__(self) -> bool:
        return self.inside < 3


SPECIAL = {
    "call": lambda holder, x: holder(x),
    "getitem": lambda holder, x: x * holder[1],
    "len": lambda holder, x: x * len(holder),
    "bool": lambda holder, x: x if holder else -x,
}


@reads("state behind the special method", "inside", over=SPECIAL)
def special_method(device: str, which: str) -> World:
    holder = Comparing()
    return World(lambda x: SPECIAL[which](holder, x), *both(_sets(holder, "inside"), 2.0, 5.0))


# --- Objects that stand for others ---------------------------------------------------------------


@reads("the target of a weak reference", "warmth", "reference")
def weak_target(device: str) -> World:
    class Target:
        def __init__(self, warmth: float):
            self.warmth = warmth

    kept = [Target(2.0), Target(5.0)]
    holder = Box(reference=weakref.ref(kept[0]))

    def read(x: torch.Tensor) -> torch.Tensor:
        target = holder.reference()
        return x * (target.warmth if target is not None else 7.0)

    return World(
        read,
        lambda: setattr(holder, "reference", weakref.ref(kept[1])),
        lambda: setattr(holder, "reference", weakref.ref(kept[0])),
    )


@reads("an attribute behind a weak reference", "warmth", "reference")
def behind_weak(device: str) -> World:
    class Target:
        warmth = 2.0

    target = Target()
    reference = weakref.ref(target)

    def read(x: torch.Tensor) -> torch.Tensor:
        found = reference()
        assert found is not None
        return x * found.warmth

    return World(read, *both(_sets(target), 2.0, 5.0))


TEMPERATURE: contextvars.ContextVar[float] = contextvars.ContextVar("TEMPERATURE", default=2.0)


@reads("a context variable", "TEMPERATURE", "ContextVar")
def context_variable(device: str) -> World:
    return World(lambda x: x * TEMPERATURE.get(), *both(TEMPERATURE.set, 2.0, 5.0))


@reads("a thread's local", "warmth", "local")
def thread_local(device: str) -> World:
    local = threading.local()
    local.warmth = 2.0
    return World(lambda x: x * local.warmth, *both(_sets(local), 2.0, 5.0))


@reads("a mapping proxy", "warmth", "proxy")
def mapping_proxy(device: str) -> World:
    inner = {"warmth": 2.0}
    proxy = types.MappingProxyType(inner)
    return World(lambda x: x * proxy["warmth"], *both(lambda v: inner.update(warmth=v), 2.0, 5.0))


# --- Numbers in arrays and tensors ---------------------------------------------------------------


@reads("an element of a numpy array", "table", "numpy", "ndarray", "on cpu")
def numpy_element(device: str) -> World:
    table = np.asarray([2.0, 3.0])
    return World(lambda x: x * float(table[0]), *both(lambda v: table.fill(v), 2.0, 5.0))


@reads("the contents of a numpy array", "table", "numpy", "ndarray", "CPU tensor", "on cpu")
def numpy_contents(device: str) -> World:
    table = np.full(4, 2.0, np.float32)
    return World(
        lambda x: x * torch.from_numpy(table).to(x.device),
        *both(lambda v: table.fill(v), 2.0, 5.0),
    )


@reads("a CPU tensor of no axes changed in place", "warmth", "CPU tensor")
def cpu_scalar_in_place(device: str) -> World:
    holder = Box(warmth=torch.tensor(2.0))
    return World(lambda x: x * holder.warmth, *both(lambda v: holder.warmth.fill_(v), 2.0, 5.0))


@reads("a CPU tensor of no axes replaced", "warmth", "CPU tensor")
def cpu_scalar_replaced(device: str) -> World:
    holder = Box(warmth=torch.tensor(2.0))
    return World(
        lambda x: x * holder.warmth,
        *both(lambda v: setattr(holder, "warmth", torch.tensor(v)), 2.0, 5.0),
    )


@reads("a CPU tensor of no axes read by item", "warmth", "CPU tensor", "item", "number")
def cpu_scalar_item(device: str) -> World:
    holder = Box(warmth=torch.tensor(2.0))
    return World(
        lambda x: x * holder.warmth.item(), *both(lambda v: holder.warmth.fill_(v), 2.0, 5.0)
    )


@reads("a device tensor of no axes changed in place", "warmth")
def device_scalar_in_place(device: str) -> World:
    holder = Box(warmth=torch.tensor(2.0, device=device))
    return World(lambda x: x * holder.warmth, *both(lambda v: holder.warmth.fill_(v), 2.0, 5.0))


@reads("the data of a tensor", "warmth")
def tensor_data(device: str) -> World:
    holder = Box(warmth=torch.full((4, 4), 2.0, device=device))

    def put(value: float) -> None:
        holder.warmth.data = torch.full((4, 4), value, device=device)

    return World(lambda x: x * holder.warmth, *both(put, 2.0, 5.0))


@reads("the shape of a tensor replaced", "warmth")
def tensor_shape(device: str) -> World:
    holder = Box(warmth=torch.ones(4, device=device))
    return World(
        lambda x: x * holder.warmth.numel(),
        *both(
            lambda n: setattr(holder, "warmth", torch.ones(n, device=device)),
            4,
            8,
        ),
    )


@reads("an attribute of a tensor", "scale")
def attribute_of_tensor(device: str) -> World:
    weight: Any = torch.ones(4, 4, device=device)
    weight.scale = 2.0
    return World(lambda x: x * weight * weight.scale, *both(_sets(weight, "scale"), 2.0, 5.0))
