"""Changes of a model between two passes: modules, parameters, buffers, hooks, options, modes."""

from __future__ import annotations

import collections
from typing import Any

import torch
from torch.nn.utils import parametrize, prune

from tests.torch_bridge.engine.capture.changes.worlds import BY_DYNAMO, linear, modules

nn = torch.nn


class Net(nn.Module):
    """Layers, a nested child, a buffer, and numbers in several places."""

    def __init__(self, middle: nn.Module | None = None):
        super().__init__()
        self.first = linear(1, bias=True)
        self.middle = nn.Sequential(
            collections.OrderedDict(act=nn.Tanh(), inner=middle or nn.Identity())
        )
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


def attribute(name: str, first: Any, second: Any) -> tuple[Any, Any]:
    """An edit and the edit back of an attribute by a dotted name."""
    path, _, leaf = name.rpartition(".")

    def put(value: Any) -> Any:
        return lambda net: setattr(net.get_submodule(path), leaf, value)

    return put(second), put(first)


def kept(edit: Any) -> tuple[Any, Any]:
    """An edit that gives handles, which the edit back removes."""
    handles: list[Any] = []

    def put(net: Any) -> None:
        handles.append(edit(net))

    def back(_net: Any) -> None:
        handles.pop(0).remove()

    return put, back


# --- Numbers, flags and options ------------------------------------------------------------------

modules("a number of the model", Net, *attribute("beta", 2.0, 5.0), "beta")
modules("a flag of the model", Net, *attribute("flow", "plain", "rectified"), "flow")
modules(
    "an item of the model's config",
    Net,
    lambda net: net.config.update(gain=3.0),
    lambda net: net.config.update(gain=1.5),
    "gain",
    "config",
)

OPTIONS: list[tuple[str, Any, str, Any, Any]] = [
    ("Dropout.p", lambda: nn.Dropout(0.0), "p", 0.0, 1.0),
    ("BatchNorm1d.momentum", lambda: nn.BatchNorm1d(4), "momentum", 0.1, 0.5),
    ("BatchNorm1d.eps", lambda: nn.BatchNorm1d(4), "eps", 1e-5, 0.5),
    ("BatchNorm1d.track_running_stats", lambda: nn.BatchNorm1d(4), "training", True, False),
    ("LayerNorm.eps", lambda: nn.LayerNorm(4), "eps", 1e-5, 0.5),
    ("GroupNorm.num_groups", lambda: nn.GroupNorm(2, 4, eps=0.1), "num_groups", 2, 4),
    ("RMSNorm.eps", lambda: nn.RMSNorm(4, eps=1e-5), "eps", 1e-5, 0.5),
    ("LeakyReLU.negative_slope", lambda: nn.LeakyReLU(0.1), "negative_slope", 0.1, 0.7),
    ("ELU.alpha", lambda: nn.ELU(1.0), "alpha", 1.0, 3.0),
    ("Softplus.beta", lambda: nn.Softplus(1.0), "beta", 1.0, 3.0),
    ("Softmax.dim", lambda: nn.Softmax(0), "dim", 0, 1),
    ("GELU.approximate", lambda: nn.GELU(), "approximate", "none", "tanh"),
    ("Hardtanh.max_val", lambda: nn.Hardtanh(), "max_val", 1.0, 0.1),
    ("Threshold.threshold", lambda: nn.Threshold(0.1, 0.2), "threshold", 0.1, 0.4),
]
for title, make_option, option, old, new in OPTIONS:
    modules(
        f"an option of a module: {title}",
        lambda make_option=make_option: Net(make_option()),
        *attribute(f"middle.inner.{option}", old, new),
        option,
    )


# --- Modules, parameters, buffers ----------------------------------------------------------------

modules(
    "an activation replaced",
    Net,
    lambda net: setattr(net.middle, "act", nn.ReLU()),
    lambda net: setattr(net.middle, "act", nn.Tanh()),
    "act",
)
modules(
    "a submodule replaced",
    Net,
    lambda net: setattr(net, "last", linear(5).to(net.shift.device)),
    lambda net: setattr(net, "last", linear(2).to(net.shift.device)),
    "last",
)
modules(
    "a nested submodule replaced by another with parameters",
    Net,
    lambda net: net.middle.__setitem__(1, linear(5).to(net.shift.device)),
    lambda net: net.middle.__setitem__(1, nn.Identity()),
    "inner",
    "middle",
)
modules(
    "a submodule added",
    Net,
    lambda net: net.middle.append(nn.ReLU()),
    lambda net: net.middle.pop(2),
    "middle",
    "2",
)
modules(
    "an optional submodule",
    Net,
    lambda net: setattr(net, "extra", nn.Tanh()),
    lambda net: (delattr(net, "extra"), setattr(net, "extra", None)),
    "extra",
)
modules(
    "a parameter replaced",
    Net,
    lambda net: setattr(net.first, "weight", nn.Parameter(net.first.weight.detach() * 2)),
    lambda net: setattr(net.first, "weight", nn.Parameter(net.first.weight.detach() / 2)),
    "weight",
)
modules(
    "a parameter set to None",
    Net,
    lambda net: net.first.register_parameter("bias", None),
    lambda net: net.first.register_parameter(
        "bias", nn.Parameter(torch.ones(4, device=net.shift.device))
    ),
    "bias",
)


def _scaled(factor: float) -> Any:
    def edit(net: Any) -> None:
        with torch.no_grad():
            net.first.weight.mul_(factor)

    return edit


modules("a parameter changed in place", Net, _scaled(2.0), _scaled(0.5), "weight")


def _data(factor: float) -> Any:
    def edit(net: Any) -> None:
        net.first.weight.data = net.first.weight.data * factor

    return edit


modules("the data of a parameter", Net, _data(2.0), _data(0.5), "weight")
modules(
    "a buffer replaced",
    Net,
    lambda net: setattr(net, "shift", torch.full((4,), 3.0, device=net.shift.device)),
    lambda net: setattr(net, "shift", torch.full((4,), 0.25, device=net.shift.device)),
    "shift",
)
modules(
    "a buffer changed in place",
    Net,
    lambda net: net.shift.fill_(3.0),
    lambda net: net.shift.fill_(0.25),
    "shift",
)


def _loaded(assign: bool, factor: float) -> Any:
    def edit(net: Any) -> None:
        state = {name: one.detach() * factor for name, one in net.state_dict().items()}
        net.load_state_dict(state, assign=assign)

    return edit


modules("load_state_dict", Net, _loaded(False, 2.0), _loaded(False, 0.5), "weight")
modules("load_state_dict by assignment", Net, _loaded(True, 2.0), _loaded(True, 0.5), "weight")


def _tied(net: Any) -> None:
    net.last.weight = net.first.weight


def _untied(net: Any) -> None:
    net.last.weight = nn.Parameter(net.first.weight.detach().clone())


modules("two parameters tied", Net, _tied, _untied, "weight")


class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([linear(1), linear(2)])
        self.named = nn.ModuleDict({"a": nn.Tanh(), "b": nn.ReLU()})
        self.current = "a"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.named[self.current](x) + len(self.blocks)


def _reversed(net: Any) -> None:
    net.blocks = nn.ModuleList(reversed(net.blocks))


def _swapped(net: Any) -> None:
    first, second = net.blocks
    net.blocks[0], net.blocks[1] = second, first


modules("a ModuleList replaced by its reverse", Listed, _reversed, _reversed, "blocks")
modules("two items of a ModuleList swapped", Listed, _swapped, _swapped, "blocks")
modules(
    "a module appended to a ModuleList",
    Listed,
    lambda net: net.blocks.append(linear(3).to(net.blocks[0].weight.device)),
    lambda net: net.blocks.pop(2),
    "blocks",
)
modules("which item of a ModuleDict", Listed, *attribute("current", "a", "b"), "current", "named")
modules(
    "an item of a ModuleDict",
    Listed,
    lambda net: net.named.update({"a": nn.ReLU()}),
    lambda net: net.named.update({"a": nn.Tanh()}),
    "named",
)


# --- Functions -----------------------------------------------------------------------------------

modules(
    "the forward of a submodule replaced",
    Net,
    lambda net: setattr(net.first, "forward", lambda x: x * 3.0),
    lambda net: delattr(net.first, "forward"),
    "forward",
)
modules(
    "the forward of the model replaced",
    Net,
    lambda net: setattr(net, "forward", lambda x: net.first(x) * 3.0),
    lambda net: delattr(net, "forward"),
    "forward",
)
modules(
    "a method of the model replaced",
    Net,
    lambda net: setattr(net, "helper", lambda x: x - 3.0),
    lambda net: delattr(net, "helper"),
    "helper",
)
_HELPER, _FORWARD = Net.helper, nn.Tanh.forward
modules(
    "a method of the model's class replaced",
    Net,
    lambda net: setattr(Net, "helper", lambda self, x: x - 3.0),
    lambda net: setattr(Net, "helper", _HELPER),
    "helper",
    frozen=BY_DYNAMO,
)
modules(
    "the forward of torch's class replaced",
    Net,
    lambda net: setattr(nn.Tanh, "forward", lambda self, x: x.sin()),
    lambda net: setattr(nn.Tanh, "forward", _FORWARD),
    "forward",
    frozen=BY_DYNAMO,
)


class Sine(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin()


modules(
    "the class of a submodule",
    Net,
    lambda net: setattr(net.middle.act, "__class__", Sine),
    lambda net: setattr(net.middle.act, "__class__", nn.Tanh),
    "__class__",
    "act",
    "Sine",
)


# --- Hooks ---------------------------------------------------------------------------------------


def _doubled(*args: Any) -> Any:
    return args[-1] * 2


def _double_gradient(parameter: Any) -> None:
    parameter.grad.mul_(2)


HOOKS: dict[str, Any] = {
    "forward": lambda net: net.first.register_forward_hook(_doubled),
    "forward pre": lambda net: net.first.register_forward_pre_hook(
        lambda module, args: (args[0] * 2,)
    ),
    "full backward": lambda net: net.last.register_full_backward_hook(
        lambda module, inputs, outputs: (inputs[0] * 2,)
    ),
    "full backward pre": lambda net: net.first.register_full_backward_pre_hook(
        lambda module, outputs: (outputs[0] * 2,)
    ),
    "parameter's": lambda net: net.first.weight.register_hook(_doubled),
    "post accumulate": lambda net: net.first.weight.register_post_accumulate_grad_hook(
        _double_gradient
    ),
    "global forward": lambda net: nn.modules.module.register_module_forward_hook(
        lambda module, args, result: result * 2 if isinstance(module, nn.Tanh) else None
    ),
    "global forward pre": lambda net: nn.modules.module.register_module_forward_pre_hook(
        lambda module, args: (args[0] * 2,) if isinstance(module, nn.Tanh) else None
    ),
    "global backward": lambda net: nn.modules.module.register_module_full_backward_hook(
        lambda module, inputs, outputs: (
            tuple([one * 2 for one in inputs]) if isinstance(module, nn.Tanh) else None
        )
    ),
}
for title, hook in HOOKS.items():
    options: dict[str, Any] = {"once": title == "post accumulate"}  # on the sum over all batches
    if title not in ("parameter's", "post accumulate"):
        options["frozen"] = BY_DYNAMO
    modules(f"a {title} hook", Net, *kept(hook), "hook", **options)


class Hooked(Net):
    """A model with a hook that reads a number."""

    def __init__(self):
        super().__init__()
        self.hooked = 1.0
        self.first.register_forward_hook(lambda module, args, result: result * self.hooked)


modules("what a hook reads", Hooked, *attribute("hooked", 1.0, 3.0), "hooked", "hook")


class WithGradientHook(Net):
    """A model with a hook of a parameter that reads a number."""

    def __init__(self):
        super().__init__()
        self.clip = 1.0
        self.first.weight.register_hook(lambda grad: grad * self.clip)


modules(
    "what a hook of a parameter reads",
    WithGradientHook,
    *attribute("clip", 1.0, 3.0),
    "clip",
    "hook",
)


# --- Modes, gradients, parametrizations ----------------------------------------------------------

modules(
    "requires_grad_ of a parameter",
    Net,
    lambda net: net.first.weight.requires_grad_(False),
    lambda net: net.first.weight.requires_grad_(True),
    "requires_grad",
    "weight",
)
modules(
    "requires_grad_ of the model",
    Net,
    lambda net: net.requires_grad_(False),
    lambda net: net.requires_grad_(True),
    "requires_grad",
    "does not depend on a parameter",
)


def _with_dropout() -> Net:
    net = Net(nn.Dropout(1.0))
    net.eval()
    return net


modules(
    "train of the model", _with_dropout, lambda net: net.train(), lambda net: net.eval(), "training"
)
modules(
    "train of a nested child",
    _with_dropout,
    lambda net: net.middle.inner.train(),
    lambda net: net.middle.inner.eval(),
    "training",
    "modes",
)
modules(
    "eval of BatchNorm",
    lambda: Net(nn.BatchNorm1d(4)),
    lambda net: net.middle.inner.eval(),
    lambda net: net.middle.inner.train(),
    "training",
    "modes",
)


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


modules(
    "a parametrization added",
    Net,
    lambda net: parametrize.register_parametrization(net.first, "weight", Doubled()),
    lambda net: parametrize.remove_parametrizations(net.first, "weight", leave_parametrized=False),
    "parametrization",
    "weight",
    "__class__",
)
modules(
    "weights pruned",
    Net,
    lambda net: prune.custom_from_mask(net.first, "weight", torch.eye(4, device=net.shift.device)),
    lambda net: prune.remove(net.first, "weight"),
    "weight",
    "hook",
    "outlive",
)
