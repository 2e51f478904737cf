"""Changes of what functions hold: cells, defaults, globals, code, arguments, caches."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from tests.torch_bridge.engine.capture.changes import elsewhere, objects, worlds  # noqa: F401
from tests.torch_bridge.engine.capture.changes.worlds import linear, state_of, table

optim = torch.optim
BOTH = objects.BOTH


class Helping:
    """A method that reads an attribute."""

    def __init__(self):
        self.warmth = 2.0

    def method(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.warmth


class Scaled(torch.autograd.Function):
    """Reads a number in each pass."""

    forwards, backwards = 2.0, 2.0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * Scaled.forwards

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * Scaled.backwards


class Scale:
    """A context that gives a number."""

    warmth = 2.0

    def __enter__(self) -> float:
        return self.warmth

    def __exit__(self, *exc: object) -> None:
        pass


class Given:
    """Hashable, as arguments of compiled steps must be."""

    def __init__(self, warmth: Any):
        self.warmth = warmth


def one_weight(device: str) -> torch.nn.Module:
    """A model of one row of ones."""
    model = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    return model.to(device)


def trained(x: torch.Tensor, model: Any, optimizer: Any) -> torch.Tensor:
    """A step of training."""
    optimizer.zero_grad()
    loss = model(x).sum()
    loss.backward()
    optimizer.step()
    return loss.detach()


KNOWN = {**objects.KNOWN, **globals(), "importlib": importlib}
row = functools.partial(worlds.row, known={**KNOWN, "linear": linear, "state_of": state_of})

table(
    r"""
a closure cell | warmth | warmth = $ | x * warmth | warmth = $ | ! kinds=BOTH, scope='function'
a closure cell of a called function | warmth | warmth = $\ndef helper(x): return x * warmth |
    helper(x) + 1 | warmth = $ | ! scope='function'
a default argument | warmth, __defaults__ | def step(x, warmth=$): return x * warmth | |
    step.__defaults__ = ($,)
a default keyword argument | warmth, __kwdefaults__ |
    def step(x, *, warmth=$): return x * warmth | | step.__kwdefaults__ = {'warmth': $}
a mutable default argument | table, warmth | table = {'warmth': $}\n
    def step(x, table=table): return x * table['warmth'] |  | table.update(warmth=$)
an attribute of a function | warmth | def helper(x): return x * helper.warmth\nhelper.warmth = $ |
    helper(x) | helper.warmth = $
the code of a function | helper, __code__ | def helper(x): return x * 2.0\n
    def other(x): return x * 5.0\nfirst = helper.__code__ | helper(x) |
    helper.__code__ = other.__code__ | helper.__code__ = first
a keyword of functools.partial | warmth, keywords, partial |
    def scaled(x, warmth): return x * warmth\nstep = functools.partial(scaled, warmth=$) |  |
    step.keywords.update(warmth=$)
a partial replaced | part, partial | holder = Box(part=functools.partial(torch.mul, two)) |
    holder.part(x) | holder.part = functools.partial(torch.mul, five) |
    holder.part = functools.partial(torch.mul, two)
# Globals
a global | WARMTH | WARMTH = $ | x * WARMTH | WARMTH = $ | ! kinds=BOTH, scope='module'
a global that a called function reads | WARMTH | WARMTH = $\ndef helper(x): return x * WARMTH |
    helper(x) + 1 | WARMTH = $ | ! scope='module'
a global by globals() | WARMTH, globals | WARMTH = $ | x * globals()['WARM' + 'TH'] | WARMTH = $ |
    ! scope='module'
a global function replaced | helper | def helper(x): return x * 2\nfirst = helper | helper(x) |
    helper = lambda x: -x | helper = first | ! scope='module'
a global of another module | WARMTH | elsewhere.WARMTH = $ | x * elsewhere.WARMTH |
    elsewhere.WARMTH = $
a module imported in the step | WARMTH, import | elsewhere.WARMTH = $ |
    found = importlib.import_module(elsewhere.__name__)\nreturn x * found.WARMTH |
    elsewhere.WARMTH = $
a tensor in another module | TENSOR | elsewhere.TENSOR = two | elsewhere.shifted(x) |
    elsewhere.TENSOR = five | elsewhere.TENSOR = two
an item of a dict in another module | TABLE, warmth | elsewhere.TABLE['warmth'] = $ |
    x * elsewhere.TABLE['warmth'] | elsewhere.TABLE['warmth'] = $
a function of another module patched | replaced | first = elsewhere.replaced |
    elsewhere.replaced(x) | elsewhere.replaced = torch.tanh | elsewhere.replaced = first
a builtin hidden by a global | abs |  | abs(x) | globals()['abs'] = torch.neg |
    del globals()['abs'] | ! scope='module', frozen=BY_DYNAMO
# Methods
a function held by an object | chosen | holder = Box(chosen=torch.relu) | holder.chosen(x) |
    holder.chosen = torch.tanh | holder.chosen = torch.relu
the object of a bound method | warmth | helping = Helping()\nstep = helping.method |  |
    helping.warmth = $
a method of a class patched | method |
    class Here(Helping): pass\nhelping, first = Here(), Helping.method | helping.method(x) |
    Here.method = lambda self, x: -x | Here.method = first | ! frozen=BY_DYNAMO
a method of one object patched | method | helping = Helping() | helping.method(x) |
    helping.method = lambda x: -x | del helping.method
# Arguments
a number in an object given as an argument | warmth | held = Given($) | x * given.warmth |
    held.warmth = $ | ! extra='held'
another object given as an argument | warmth | held = [Given($)] | x * given.warmth |
    held[0] = Given($) | ! extra='held[0]'
an argument of another type | given, argument | held = [2.0] | used(x, given) | held[0] = 5.0 |
    held[0] = 5 | held[0] = True | held[0] = 1 | held[0] = 0.0 | ! extra='held[0]'
an argument of the other sign | given, argument | held = [0.0] | used(x, given) | held[0] = -0.0 |
    held[0] = 0.0 | ! extra='held[0]', frozen=BY_DYNAMO
# Recursion, generators, caches, contexts
the depth of a recursion | depth | holder = Box(depth=2)\n
    def again(x, left): return x if left == 0 else again(x * 1.5, left - 1) |
    again(x, holder.depth) | holder.depth = 4 | holder.depth = 2
what a generator function reads | warmth | holder = Box(warmth=$)\ndef factors():\n
    \tfor number in range(2):\n\t\tyield holder.warmth + number | for factor in factors():\n
    \tx = x * factor\nreturn x | holder.warmth = $
what a cached function reads, and its cache cleared | warmth, cached, lru_cache |
    holder = Box(warmth=$)\n@functools.lru_cache\n
    def cached(number): return holder.warmth + number | x * cached(1) | holder.warmth = $\n
    cached.cache_clear()
what a callback in sorted reads | weights | weights = {'relu': 1.0, 'tanh': 2.0} |
    first = sorted(weights, key=lambda name: weights[name])[0]\n
    return torch.relu(x) if first == 'relu' else torch.tanh(x) | weights['tanh'] = 0.5 |
    weights['tanh'] = 2.0
what an autograd function reads | forwards | Scaled.forwards = $ | Scaled.apply(x) |
    Scaled.forwards = $
what the backward of an autograd function reads | backwards, gradient | Scaled.backwards = $\n
    weight = torch.ones(4, 4, device=device, requires_grad=True) |
    result = Scaled.apply(x * weight)\nif torch.is_grad_enabled():\n
    \t(gradient,) = torch.autograd.grad(result.sum(), weight, retain_graph=True)\n
    \treturn result + gradient\nreturn result | Scaled.backwards = $
what a with statement enters | warmth | scale = Scale()\nscale.warmth = $ | with scale as factor:\n
    \treturn x * factor | scale.warmth = $
""",
    row,
)

# --- Programs that went wrong once ---------------------------------------------------------------

row = functools.partial(row, without=worlds.WHOLE)
table(
    r"""
an optimizer nine objects away | lr | model = one_weight(device)\n
    optimizer = optim.SGD(model.parameters(), lr=1.0)\na = Box(model=model, optimizer=optimizer)\n
    for _ in range(9):\n\ta = Box(inner=a) | e = a\nfor _ in range(9):\n\te = e.inner\n
    return trained(x, e.model, e.optimizer) | optimizer.param_groups[0]['lr'] = 0.0 |
    optimizer.param_groups[0]['lr'] = 1.0 | ! state='state_of(model)'
eval of a model nine objects away | training | model = torch.nn.Dropout(1.0)\na = Box(model=model)\n
    for _ in range(9):\n\ta = Box(inner=a) | e = a\nwhile hasattr(e, 'inner'):\n\te = e.inner\n
    return e.model(x) + 1 | model.eval() | model.train()
another optimizer in an attribute | o, optimizer | model = one_weight(device)\n
    a, b = (optim.SGD(model.parameters(), lr=rate) for rate in (0.1, 0.5))\nholder = Box(o=a) |
    trained(x, model, holder.o) | holder.o = b | holder.o = a | ! state='state_of(model)'
the reverse of a list of two modules | L, modules |
    a, b = linear(1).to(device), linear(2).to(device)\nL = [a, b] | torch.relu(L[1](L[0](x))) |
    L.reverse()
which item of a dict of modules | current, D | a, b = linear(1).to(device), linear(2).to(device)\n
    D = {'a': a, 'b': b, 'current': 'a'} | D[D['current']](x) | D['current'] = 'b' |
    D['current'] = 'a'
""",
    row,
)
