"""Changes of a model between two passes: modules, parameters, buffers, hooks, options, modes."""

from __future__ import annotations

import collections
import functools
from typing import Any

import torch
from torch.nn.utils import parametrize, prune

from tests.torch_bridge.engine.capture.changes import worlds
from tests.torch_bridge.engine.capture.changes.worlds import BY_DYNAMO, linear, table

nn = torch.nn
GLOBAL = nn.modules.module


class Net(nn.Module):
    """Layers, a nested child, a buffer, and numbers in several places."""

    def __init__(self, *middle: nn.Module):
        super().__init__()
        self.first = linear(1, bias=True)
        inner = middle[0] if len(middle) == 1 else nn.Sequential(*middle)
        self.middle = nn.Sequential(collections.OrderedDict(act=nn.Tanh(), inner=inner))
        self.last = linear(2)
        self.register_buffer("shift", torch.full((4,), 0.25))
        self.beta = 2.0
        self.config: Any = {"gain": 1.5}
        self.flow = "plain"
        self.extra: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.middle(self.first(x)) * self.beta + self.shift
        x = self.last(self.helper(x)) * self.config["gain"]
        if self.extra is not None:
            x = self.extra(x)
        return torch.relu(x) if self.flow == "rectified" else x

    def helper(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.5


def norms() -> Net:
    """Norms whose options matter."""
    return Net(nn.BatchNorm1d(4), nn.GroupNorm(1, 4, eps=0.1))


def activations() -> Net:
    """Activations whose options matter."""
    return Net(nn.GELU(), nn.Dropout(0.0))


class Hooked(Net):
    """A model with hooks that read numbers."""

    def __init__(self):
        super().__init__()
        self.hooked, self.clip = 1.0, 1.0
        self.first.register_forward_hook(lambda module, args, result: result * self.hooked)
        self.first.weight.register_hook(lambda grad: grad * self.clip)


class Listed(nn.Module):
    """Modules in a list and in a dict."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([linear(1), linear(2)])
        self.named = nn.ModuleDict({"a": nn.Tanh(), "b": nn.ReLU()})
        self.current = "a"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.named[self.current](x) + len(self.blocks)


class Sine(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin()


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


HELPER, FORWARD = Net.helper, nn.Tanh.forward


def doubled(*args: Any) -> Any:
    """A hook: twice what it gets last."""
    return args[-1] * 2


def doubled_first(module: Any, args: Any, *rest: Any) -> Any:
    """A hook: twice the first of what it gets."""
    return (args[0] * 2,)


def of_tanh(hook: Any) -> Any:
    """A hook of all modules that does something to those of one class."""
    return lambda module, *args: hook(module, *args) if isinstance(module, nn.Tanh) else None


def double_gradient(parameter: Any) -> None:
    """A hook that changes a gradient in place."""
    parameter.grad.mul_(2)


modules = functools.partial(
    worlds.modules, known={**globals(), "parametrize": parametrize, "prune": prune}
)

# --- Numbers, flags and options ------------------------------------------------------------------

table(
    r"""
numbers and a flag of the model | beta, flow, gain, config | Net | net.beta = 5.0 |
    net.flow = 'rectified' | net.config.update(gain=3.0) | net.beta = 2.0
options of norms | momentum, num_groups | norms | net.middle.inner[0].momentum = 0.5 |
    net.middle.inner[1].num_groups = 2
options of activations | approximate, p | activations | net.middle.inner[0].approximate = 'tanh' |
    net.middle.inner[1].p = 1.0
# Modules, parameters, buffers
an activation replaced | act | Net | net.middle.act = nn.ReLU() | net.middle.act = nn.Tanh()
a nested submodule replaced by another with parameters | inner, middle | Net |
    net.middle[1] = linear(5).to(device) | net.middle[1] = nn.Identity()
an optional submodule | extra | Net | net.extra = nn.Tanh() | del net.extra\nnet.extra = None
a parameter replaced | weight | Net |
    net.first.weight = nn.Parameter(net.first.weight.detach() * 2) |
    net.first.weight = nn.Parameter(net.first.weight.detach() / 2)
a parameter set to None | bias | Net | net.first.register_parameter('bias', None) |
    net.first.register_parameter('bias', nn.Parameter(torch.ones(4, device=device)))
a parameter changed in place | weight | Net | with torch.no_grad():\n\tnet.first.weight.mul_(2.0) |
    with torch.no_grad():\n\tnet.first.weight.mul_(0.5)
the data of a parameter | weight | Net | net.first.weight.data = net.first.weight.data * 2.0 |
    net.first.weight.data = net.first.weight.data * 0.5
a buffer replaced, and changed in place | shift | Net |
    net.shift = torch.full((4,), 3.0, device=device) | net.shift.fill_(0.25)
load_state_dict | weight | Net |
    net.load_state_dict({name: one.detach() * 2 for name, one in net.state_dict().items()}) |
    net.load_state_dict({name: one.detach() * 2 for name, one in net.state_dict().items()},
    assign=True)
two parameters tied | weight | Net | net.last.weight = net.first.weight |
    net.last.weight = nn.Parameter(net.first.weight.detach().clone())
a ModuleList replaced by its reverse, and two of its items swapped | blocks | Listed |
    net.blocks = nn.ModuleList(reversed(net.blocks)) | first, second = net.blocks\n
    net.blocks[0], net.blocks[1] = second, first
a module appended to a ModuleList | blocks | Listed | net.blocks.append(linear(3).to(device)) |
    net.blocks.pop(2)
an item of a ModuleDict, and which one | current, named | Listed | net.current = 'b' |
    net.named.update({'b': Sine()})
# Functions
the forward of a submodule replaced | forward | Net | net.first.forward = lambda x: x * 3.0 |
    del net.first.forward
a method of the model replaced | helper | Net | net.helper = lambda x: x - 3.0 | del net.helper
a method of the model's class replaced | helper | Net | Net.helper = lambda self, x: x - 3.0 |
    Net.helper = HELPER | ! frozen=BY_DYNAMO
the forward of torch's class replaced | forward | Net | nn.Tanh.forward = lambda self, x: x.sin() |
    nn.Tanh.forward = FORWARD | ! frozen=BY_DYNAMO
the class of a submodule | __class__, act, Sine | Net | net.middle.act.__class__ = Sine |
    net.middle.act.__class__ = nn.Tanh
""",
    modules,
)

# --- Hooks ---------------------------------------------------------------------------------------

HOOKS = {
    "forward": "net.first.register_forward_hook(doubled)",
    "forward pre": "net.first.register_forward_pre_hook(doubled_first)",
    "full backward": "net.last.register_full_backward_hook(doubled_first)",
    "full backward pre": "net.first.register_full_backward_pre_hook(doubled_first)",
    "parameter's": "net.first.weight.register_hook(doubled)",
    "post accumulate": "net.first.weight.register_post_accumulate_grad_hook(double_gradient)",
    "global forward": "GLOBAL.register_module_forward_hook(of_tanh(doubled))",
    "global backward": "GLOBAL.register_module_full_backward_hook(of_tanh(doubled_first))",
}
for title, hook in HOOKS.items():
    modules(
        f"a {title} hook",
        "hook",
        "Net",
        f"handle = {hook}",
        "handle.remove()",
        once=title == "post accumulate",  # on the sum over all batches
        frozen="" if title in ("parameter's", "post accumulate") else BY_DYNAMO,
    )
table(
    r"""
what a hook reads | hooked, hook | Hooked | net.hooked = 3.0 | net.hooked = 1.0
what a parameter's hook reads | clip, hook | Hooked | net.clip = 3.0 | net.clip = 1.0
# Modes, gradients, parametrizations
requires_grad_ of a parameter | requires_grad, weight | Net |
    net.first.weight.requires_grad_(False) | net.first.weight.requires_grad_(True)
requires_grad_ of the model | requires_grad, does not depend on a parameter | Net |
    net.requires_grad_(False) | net.requires_grad_(True)
train of the model, and eval of a nested child | training, modes |
    lambda: Net(nn.Dropout(1.0)).eval() | net.train() | net.middle.inner.eval()
eval of BatchNorm | training, modes | lambda: Net(nn.BatchNorm1d(4)) | net.middle.inner.eval() |
    net.middle.inner.train()
a parametrization added | parametrization, weight, __class__ | Net |
    parametrize.register_parametrization(net.first, 'weight', Doubled()) |
    parametrize.remove_parametrizations(net.first, 'weight', leave_parametrized=False)
weights pruned | weight, hook, outlive | Net |
    prune.custom_from_mask(net.first, 'weight', torch.eye(4, device=device)) |
    prune.remove(net.first, 'weight')
""",
    modules,
)
