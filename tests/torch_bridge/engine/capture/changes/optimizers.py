"""Hyperparameters of every optimizer of `torch.optim`, as floats and as other kinds."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import numpy as np  # noqa: F401
import torch

from tests.torch_bridge.engine.capture.changes import worlds
from tests.torch_bridge.engine.capture.changes.worlds import Trainer, linear

optim = torch.optim

OPTIONS: dict[str, dict[str, Any]] = {
    "ASGD": {"lr": 0.1, "t0": 1.0, "lambd": 1e-2},
    "Adadelta": {"lr": 1.0, "weight_decay": 0.01},
    "Adafactor": {"lr": 0.1, "weight_decay": 0.01},
    "Adagrad": {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.01},
    "Adam": {"lr": 0.1, "amsgrad": True, "weight_decay": 0.01},
    "AdamW": {"lr": 0.1, "amsgrad": True, "weight_decay": 0.01},
    "Adamax": {"lr": 0.1, "weight_decay": 0.01},
    "LBFGS": {"lr": 0.1, "max_iter": 3},
    "Muon": {"lr": 0.1, "weight_decay": 0.01, "ns_steps": 1},
    "NAdam": {"lr": 0.1, "weight_decay": 0.01},
    "RAdam": {"lr": 0.1, "weight_decay": 0.01},
    "RMSprop": {"lr": 0.1, "momentum": 0.5, "centered": True, "weight_decay": 0.01},
    "Rprop": {"lr": 0.1},
    "SGD": {"lr": 0.1, "momentum": 0.5, "weight_decay": 0.01, "dampening": 0.0, "nesterov": True},
}
"""Options that make the numbers that are changed below matter."""

CHANGED: dict[str, Any] = {
    "lr": 0.4,
    "weight_decay": 0.5,
    "maximize": True,
    "betas": (0.5, 0.6),
    "eps": 0.3,
    "amsgrad": False,
    "decoupled_weight_decay": None,
    "lambd": 0.5,
    "alpha": 0.3,
    "t0": 3.0,
    "rho": 0.4,
    "beta2_decay": -0.3,
    "d": 0.2,
    "lr_decay": 0.9,
    "momentum": 0.2,
    "nesterov": False,
    "ns_coefficients": (3.0, -4.0, 2.0),
    "ns_steps": 2,
    "adjust_lr_fn": "match_rms_adamw",
    "momentum_decay": 0.3,
    "centered": False,
    "etas": (0.2, 2.0),
    "step_sizes": (1e-3, 0.05),
    "dampening": 0.0,
    "max_iter": 1,
    "tolerance_grad": 1e3,
    "history_size": 1,
    "line_search_fn": "strong_wolfe",
    "tolerance_change": 1e3,
    "max_eval": 1,
}

SPECIAL: dict[tuple[str, str], Any] = {
    ("Adafactor", "eps"): (1e-2, 0.3),
    ("SGD", "dampening"): 0.5,
}

CAPTURABLE = ("NAdam", "RAdam")
"""Optimizers that compiled steps take in this form only."""

NOT_CHANGED = {
    "foreach": "chooses an implementation of the same arithmetic",
    "fused": "chooses an implementation of the same arithmetic",
    "capturable": "chooses an implementation of the same arithmetic",
    "differentiable": "chooses an implementation of the same arithmetic",
    "initial_accumulator_value": "is read by the constructor alone",
}


class WithClosure(Trainer):
    """LBFGS computes losses itself."""

    def step(self, x: torch.Tensor) -> torch.Tensor:
        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = self.model(x).square().sum()
            loss.backward()
            return loss

        return self.optimizer.step(closure).detach()


class OneMatrix(Trainer):
    """Muon takes matrices only."""

    def __init__(self, device: str, make: Any):
        super().__init__(device, lambda parameters: optim.SGD(parameters))
        self.model = torch.nn.Sequential(linear(1), torch.nn.Tanh()).to(device)
        self.optimizer = make(self.model.parameters())


KINDS: dict[str, Any] = {"LBFGS": WithClosure, "Muon": OneMatrix}

LOOSE = {"LBFGS": 2e-3, "RMSprop": 1e-2}
"""Relative tolerances: these divide by differences."""

AGAINST = {"Muon": "lazy"}
"""Muon's iteration runs in bfloat16, whose rounding it makes large."""


def every_optimizer() -> dict[str, Any]:
    """The optimizers of `torch.optim`; SparseAdam takes sparse gradients, which `jax` has not."""
    found = {
        name: kind
        for name, kind in vars(optim).items()
        if isinstance(kind, type) and issubclass(kind, optim.Optimizer)
    }
    return {n: kind for n, kind in found.items() if n not in ("Optimizer", "SparseAdam")}


def setting(name: str, value: str) -> str:
    """An edit that puts a value into each group."""
    return f"for group in t.optimizer.param_groups:\n    group[{name!r}] = {value}"


def make(name: str, **more: Any) -> Any:
    kind = every_optimizer()[name]
    if "foreach" in inspect.signature(kind).parameters:
        more["foreach"] = True  # as is the default on `jax`; what it leaves in gradients differs

    def made(parameters: Any) -> Any:
        mine = list(parameters)
        chosen = {**OPTIONS[name], **more}
        if name in CAPTURABLE and mine[0].device.type != "cpu":
            chosen["capturable"] = True
        return kind(mine, **chosen)

    return made


trains = functools.partial(worlds.trains, known=globals(), rtol=1e-4)
_REFUSED: dict[str, tuple[str, ...]] = {
    "LBFGS": ("LBFGS", "value of a tensor"),
    "Adafactor": ("Adafactor", "a number that changes from step to step"),
    "ASGD": ("ASGD", "a number that changes from step to step"),
}
"""Optimizers that compiled steps refuse as such, by the line where Python decides anew."""

changes: set[str] = set()
for name, optimizer in every_optimizer().items():
    defaults = optimizer([torch.nn.Parameter(torch.ones(2, 2))], **OPTIONS[name]).defaults
    changed = {option: CHANGED[option] for option in defaults if option not in NOT_CHANGED}
    if "decoupled_weight_decay" in changed:
        changed["decoupled_weight_decay"] = not defaults["decoupled_weight_decay"]
    changed |= {option: value for (of, option), value in SPECIAL.items() if of == name}
    if name not in _REFUSED:  # each option with one of them: the way is the same for all
        changed = {key: changed[key] for key in changed if key not in changes} or {"lr": 0.4}
        changes |= changed.keys()
    order = sorted(changed, key="eps".__ne__)  # small denominators would enlarge rounding errors
    trains(
        f"options of {name}",
        ", ".join([*changed, *_REFUSED.get(name, ())]),
        f"make({name!r})",
        *(setting(option, repr(changed[option])) for option in order),
        kind=KINDS.get(name, Trainer),
        rtol=LOOSE.get(name, 1e-4),
        against=AGAINST.get(name, "cpu"),
        without=(*worlds.TRAINS, "lazy"),
    )

# --- Hyperparameters that are no Python floats ---------------------------------------------------

for which, kind in (("SGD", "np.float32"), ("Adam", "np.float64")):
    trains(
        f"{which}'s numbers as {kind} and as integers",
        "lr, weight_decay",
        f"make({which!r}, lr={kind}(0.1), weight_decay={kind}(0.1))",
        setting("lr", f"{kind}(0.4)"),
        setting("weight_decay", f"{kind}(0.4)"),
        setting("lr", "1"),
        setting("lr", "0"),
    )
trains(
    "Adam's betas as a list, and an item of it",
    "betas",
    "make('Adam')",
    setting("betas", "[0.5, 0.6]"),
    "for group in t.optimizer.param_groups:\n    group['betas'][0] = 0.9",
)


class OnDevice(Trainer):
    """Its learning rate is a tensor on the device of the model; options are for the device."""

    def __init__(self, name: str, place: str, options: dict[str, Any], device: str, make: Any):
        rate = torch.tensor(0.1, device=device if place == "device" else "cpu")
        kind = every_optimizer()[name]
        more = options if device != "cpu" else {}
        super().__init__(device, lambda parameters: kind(parameters, lr=rate, **more))


for which, place, more in (
    ("Adam", "device", {"capturable": True, "foreach": True}),
    ("AdamW", "device", {"fused": True}),
    ("SGD", "device", {"fused": True}),
    ("SGD", "CPU", {}),
    ("Adam", "CPU", {}),
):
    trains(
        f"{which}'s lr as a {place} tensor, {list(more)}",
        "lr, learning rate, CPU tensor",
        "None",
        "for group in t.optimizer.param_groups:\n    group['lr'].fill_(0.4)",
        setting("lr", "torch.tensor(0.1, device=group['lr'].device)"),
        kind=functools.partial(OnDevice, which, place, more),
    )
