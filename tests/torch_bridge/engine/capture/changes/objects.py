"""Changes of objects and containers that a step reads numbers, flags and tensors from.

`test_drawn_programs.py` has attributes, items of dicts and lists, and fields at any depth; here are
the other ways to come to a value.
"""

from __future__ import annotations

import array  # noqa: F401
import contextvars
import dataclasses
import enum
import functools
import math
import threading  # noqa: F401
import types
import weakref  # noqa: F401
from typing import Any

import numpy as np
import torch

from tests.torch_bridge.engine.capture.changes import worlds
from tests.torch_bridge.engine.capture.changes.worlds import BY_DYNAMO, table

Box = types.SimpleNamespace
BOTH = ("number", "tensor")


class Level(enum.Enum):
    LOW = 2.0
    HIGH = 5.0


@dataclasses.dataclass(frozen=True)
class Frozen:
    warmth: Any


class Slotted:
    __slots__ = ("warmth",)

    def __init__(self, warmth: Any):
        self.warmth = warmth


class WithProperty:
    """State behind a property, one behind a cached property, and one behind a descriptor."""

    def __init__(self, value: Any):
        self._kept, self.base = [value], value

    warmth = property(lambda self: self._kept[0])
    cached = functools.cached_property(lambda self: self.base)


class Descriptor:
    def __get__(self, instance: Any, owner: Any = None) -> float:
        return instance.store["warmth"]


class Described:
    warmth = Descriptor()

    def __init__(self):
        self.store = {"warmth": 2.0}


class Proxy:
    """Attributes that are kept elsewhere."""

    def __init__(self, inner: Any):
        self.__dict__["_inner"] = inner

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["_inner"][name]


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


class Table(dict):
    """A dict with attributes."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Numbers(list):
    """A list with a method."""

    def first(self) -> float:
        return self[0]


TEMPERATURE: contextvars.ContextVar[float] = contextvars.ContextVar("TEMPERATURE", default=2.0)


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


def nested(names: str, leaf: Any) -> Any:
    """Objects in objects by these names; the innermost has `warmth`."""
    outer = Box(warmth=leaf)
    for name in reversed(names):
        outer = Box(**{name: outer})
    return outer


SEQUENCES: dict[str, list[Any]] = {
    "numbers": [2.0, 5.0, 5, True, 1, 1.0],
    "zeros": [1.0, 0.0, -0.0, 0.0],
    "not finite": [1.0, math.nan, math.inf],
    "words": ["relu", "tanh", None, b"\x02", b"\x05", 3.0],
    "numpy": [np.float32(2), np.float32(5), np.float64(5), np.int64(2), np.bool_(True)],
    "numpy bool": [np.bool_(True), np.bool_(False)],
    "collections": [(2.0, 3), (5.0, 7), frozenset({2}), frozenset({5}), slice(0, 2), slice(2, 4)],
    "others": [Level.LOW, Level.HIGH, complex(2.0, 0.0), complex(5.0, 0.0)],
    "of torch": [torch.float32, torch.bfloat16, torch.relu, torch.tanh, torch.nn.ReLU],
}
"""Values of one attribute, one after the other."""

KNOWN: dict[str, Any] = dict(globals())
row = functools.partial(worlds.row, known=KNOWN)

for title, values in SEQUENCES.items():
    row(
        f"an attribute of type: {title}",
        "setting",
        f"values = SEQUENCES[{title!r}]\nholder = Box(setting=values[0])",
        "used(x, holder.setting)",
        *(f"holder.setting = values[{at}]" for at in range(1, len(values))),
        frozen=BY_DYNAMO if title in ("zeros", "numpy bool") else "",
    )

# --- Attributes ----------------------------------------------------------------------------------

table(
    r"""
an object replaced in the middle of the path | warmth, d | a = nested('bcdef', 2.0)\n
    old, new = a.b.c.d, Box(e=Box(f=Box(warmth=5.0))) | x * a.b.c.d.e.f.warmth | a.b.c.d = new |
    a.b.c.d = old
the namespace of an object replaced | warmth, __dict__ | class Warm: pass\na = Warm()\n
    a.__dict__ = {'warmth': $} | x * a.warmth | a.__dict__ = {'warmth': $}
an item of the namespace that a function returns | warmth | a = Box(warmth=$)\n
    whole = lambda holder: holder.__dict__ | x * whole(a)['warmth'] | a.warmth = $
an attribute that a tensor is given | heated | scale = two |
    x * scale if getattr(scale, 'heated', False) else x + scale | scale.heated = True |
    del scale.heated
an attribute of a tensor | scale | weight = torch.ones(4, 4, device=device)\nweight.scale = $ |
    x * weight * weight.scale | weight.scale = $
an attribute with a default by getattr | warmth | holder = Box() |
    x * getattr(holder, 'warmth', 2.0) | holder.warmth = 5.0 | del holder.warmth
the computed name of getattr | which, warmth, cold |
    holder = Box(warmth=2.0, cold=5.0, which='warmth') | x * getattr(holder, holder.which) |
    holder.which = 'cold' | holder.which = 'warmth'
vars of an object | warmth, vars | holder = Box(warmth=$, cold=1.0) |
    x * sum(vars(holder).values()) | holder.warmth = $
attributes unpacked as keywords | warmth, vars | holder = Box(warmth=$)\n
    def scaled(x, **factors): return x * math.prod(factors.values()) | scaled(x, **vars(holder)) |
    holder.warmth = $
# Classes and what they define
a frozen dataclass replaced | warmth, config | holder = Box(config=Frozen($)) |
    x * holder.config.warmth | holder.config = Frozen($)
state behind a property | _kept, warmth | holder = WithProperty($) | x * holder.warmth |
    holder._kept[0] = $
a cached property cleared | cached, base | holder = WithProperty($) | x * holder.cached |
    holder.base = $\nvars(holder).pop('cached', None)
a slot | warmth | a = Slotted($) | x * a.warmth | a.warmth = $ | ! kinds=BOTH
a class attribute | warmth | class Here:\n\twarmth = $\nholder = Here() | x * holder.warmth |
    Here.warmth = $
an attribute of the class, through the class | warmth | class Base:\n\twarmth = $\n
    class Derived(Base): pass\nholder = Derived() | x * Derived.warmth | Base.warmth = $
an attribute that begins to hide that of the class | warmth | class Base:\n\twarmth = $\n
    class Derived(Base): pass\nholder = Derived() | x * holder.warmth | holder.warmth = 5.0 |
    del holder.warmth
the class of an object | __class__, warmth | class One:\n\twarmth = 2.0\nclass Two:\n
    \twarmth = 5.0\nholder = One() | x * holder.warmth | holder.__class__ = Two |
    holder.__class__ = One
what __getattr__ finds | warmth, _inner | inner = {'warmth': $}\nproxy = Proxy(inner) |
    x * proxy.warmth | inner.update(warmth=$)
what a descriptor finds | warmth, store | holder = Described() | x * holder.warmth |
    holder.store.update(warmth=$)
state behind the special method call | inside | holder = Comparing() | holder(x) |
    holder.inside = $
state behind the special method getitem | inside | holder = Comparing() | x * holder[1] |
    holder.inside = $
state behind the special method len | inside | holder = Comparing() | x * len(holder) |
    holder.inside = $
state behind the special method bool | inside | holder = Comparing() | x if holder else -x |
    holder.inside = $
# Objects that stand for others
the target of a weak reference | warmth, reference | a, b = WithProperty(2.0), WithProperty(5.0)\n
    holder = Box(reference=weakref.ref(a)) | x * holder.reference().base |
    holder.reference = weakref.ref(b) | holder.reference = weakref.ref(a)
an attribute behind a weak reference | base, reference | target = WithProperty($)\n
    reference = weakref.ref(target) | x * reference().base | target.base = $
a context variable | TEMPERATURE, ContextVar | TEMPERATURE.set($) | x * TEMPERATURE.get() |
    TEMPERATURE.set($)
a thread's local | warmth, local | local = threading.local()\nlocal.warmth = $ | x * local.warmth |
    local.warmth = $
a mapping proxy | warmth, proxy | inner = {'warmth': $}\nproxy = types.MappingProxyType(inner) |
    x * proxy['warmth'] | inner.update(warmth=$)
# Numbers in arrays and tensors
an element of a numpy array | table, numpy, ndarray, on cpu | table = np.asarray([$, 3.0]) |
    x * float(table[0]) | table.fill($)
the contents of a numpy array | table, numpy, ndarray, CPU tensor, on cpu |
    table = np.full(4, $, np.float32) | x * torch.from_numpy(table).to(x.device) | table.fill($)
a CPU tensor of no axes changed in place | warmth, CPU tensor | warmth = torch.tensor($) |
    x * warmth | warmth.fill_($)
a CPU tensor of no axes replaced | warmth, CPU tensor | a = Box(warmth=torch.tensor($)) |
    x * a.warmth | a.warmth = torch.tensor($)
a CPU tensor of no axes read by item | warmth, CPU tensor, item, number |
    a = Box(warmth=torch.tensor($)) | x * a.warmth.item() | a.warmth.fill_($)
a device tensor of no axes changed in place | warmth | warmth = torch.tensor($, device=device) |
    x * warmth | warmth.fill_($)
the data of a tensor | warmth | warmth = torch.full((4, 4), $, device=device) | x * warmth |
    warmth.data = torch.full((4, 4), $, device=device)
the shape of a tensor replaced | warmth | holder = Box(warmth=torch.ones(4, device=device)) |
    x * holder.warmth.numel() | holder.warmth = torch.ones(8, device=device) |
    holder.warmth = torch.ones(4, device=device)
# Containers
an item of a dict by get | warmth, table | table = {} | x * table.get('warmth', 2.0) |
    table.update(warmth=5.0) | table.clear()
whether a key is in a dict | warmth, table | table = {} | x if 'warmth' in table else -x |
    table.update(warmth=1) | table.clear()
what is added to a dict that is iterated | warmth, table | table = {'cold': two} |
    for value in table.values():\n\tx = x * value\nreturn x | table.update(warmth=$) |
    table.pop('warmth') | ! kinds=BOTH
the order of a dict | table | table = {'add': 1.0, 'multiply': 2.0} |
    for name, value in table.items():\n\tx = x + value if name == 'add' else x * value\nreturn x |
    table['add'] = table.pop('add') | table['multiply'] = table.pop('multiply')
a default dict | warmth, table | table = collections.defaultdict(lambda: 2.0) |
    x * table['warmth'] | table['warmth'] = $
a chain map | warmth, table, maps | own = {}\ntable = collections.ChainMap(own, {'warmth': 2.0}) |
    x * table['warmth'] | own['warmth'] = $ | ! frozen=BY_DYNAMO
what is appended to a list | factors | factors = [two] | for factor in factors:\n\tx = x * factor\n
    return x | factors.append($) | factors.pop()
the order of a list | f | f = [2.0, 5.0] | x * f[0] + f[1] | f.reverse()
the sum of a list | f | f = [2.0, $] | x * sum(f) | f[1] = 7.0 | f[1] = 2.0
a list emptied that the step asks for | f | f = [2.0] | x * f[0] if f else -x | f.clear() |
    f.append(2.0)
a comprehension over a list | f | f = [$, 5.0] | torch.stack([x * one for one in f]).sum(0) |
    f[0] = $
the elements of a set | chosen | chosen = {'relu'} |
    torch.relu(x) if 'relu' in chosen else torch.tanh(x) | chosen.clear() | chosen.add('relu')
an item of a deque | window | window = collections.deque([$], maxlen=1) | x * window[0] |
    window.append($)
the sum of a deque | window | window = collections.deque([$, $], maxlen=2) | x * sum(window) |
    window.append($)
an element of array.array | numbers, array | numbers = array.array('d', [$]) | x * numbers[0] |
    numbers[0] = $
a byte of a bytearray | raw, bytearray | raw = bytearray([2]) | x * raw[0] | raw[0] = 5 | raw[0] = 2
a subclass of dict read by attribute | warmth, table | table = Table(warmth=$) | x * table.warmth |
    table['warmth'] = $
a subclass of list read by a method | numbers | numbers = Numbers([$]) | x * numbers.first() |
    numbers[0] = $
an attribute of a subclass of dict | warmth, table | table = Table()\ntable.__dict__['extra'] = $ |
    x * table.extra | vars(table).update(extra=$) | ! frozen=BY_DYNAMO
""",
    row,
)
