"""Hyperparameters of optimizers, as floats and as other kinds.

They have options of every type, or are refused by compiled steps; that each one is compiled is in
`training/test_optimizers.py`.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import numpy as np  # noqa: F401
import torch

from tests.torch_bridge.engine.capture.changes import worlds
from tests.torch_bridge.engine.capture.changes.worlds import Trainer

optim = torch.optim

OPTIONS: dict[str, dict[str, Any]] = {
    "ASGD": {"lr": 0.1, "t0": 1.0, "lambd": 1e-2},
    "Adafactor": {"lr": 0.1, "weight_decay": 0.01},
    "Adam": {"lr": 0.1, "amsgrad": True, "weight_decay": 0.01},
    "LBFGS": {"lr": 0.1, "max_iter": 3},
    "SGD": {"lr": 0.1, "momentum": 0.5, "weight_decay": 0.01, "dampening": 0.0, "nesterov": True},
}
"""Options that make the numbers that are changed below matter."""
KINDS = {name: vars(optim)[name] for name in OPTIONS}

CHANGED: dict[str, Any] = {
    "lr": 0.4,
    "weight_decay": 0.5,
    "maximize": True,
    "betas": (0.5, 0.6),
    "eps": 0.3,
    "lambd": 0.5,
    "alpha": 0.3,
    "t0": 3.0,
    "beta2_decay": -0.3,
    "d": 0.2,
    "momentum": 0.2,
    "nesterov": False,
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

NOT_CHANGED = {
    "foreach": "chooses an implementation of the same arithmetic",
    "fused": "chooses an implementation of the same arithmetic",
    "capturable": "chooses an implementation of the same arithmetic",
    "differentiable": "chooses an implementation of the same arithmetic",
    "initial_accumulator_value": "is read by the constructor alone",
    "decoupled_weight_decay": "is a flag as `maximize` is",
    "amsgrad": "is a flag as `maximize` is",
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


def setting(name: str, value: str) -> str:
    """An edit that puts a value into each group."""
    return f"for group in t.optimizer.param_groups:\n    group[{name!r}] = {value}"


def make(name: str, **more: Any) -> Any:
    kind = KINDS[name]
    if "foreach" in inspect.signature(kind).parameters:
        more["foreach"] = True  # as is the default on `jax`; what it leaves in gradients differs

    def made(parameters: Any) -> Any:
        mine = list(parameters)
        chosen = {**OPTIONS[name], **more}
        return kind(mine, **chosen)

    return made


trains = functools.partial(worlds.trains, known=globals(), rtol=1e-4)
_REFUSED: dict[str, tuple[str, ...]] = {
    "LBFGS": ("LBFGS", "value of a tensor"),
    "ASGD": ("ASGD", "a number that changes from step to step"),
}
"""Optimizers that compiled steps refuse as such, by the line where Python decides anew."""

changes: set[str] = set()
for name, optimizer in KINDS.items():
    defaults = optimizer([torch.nn.Parameter(torch.ones(2, 2))], **OPTIONS[name]).defaults
    changed = {option: CHANGED[option] for option in defaults if option not in NOT_CHANGED}
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
        kind=WithClosure if name == "LBFGS" else Trainer,
        rtol=2e-3 if name == "LBFGS" else 1e-4,  # it divides by differences
        without=(*worlds.TRAINS, "lazy"),
    )

# --- Hyperparameters that are no Python floats ---------------------------------------------------

trains(
    "SGD's numbers as numpy's and as integers",
    "lr, weight_decay",
    "make('SGD', lr=np.float64(0.1), weight_decay=np.float32(0.1))",
    setting("lr", "np.float64(0.4)"),
    setting("weight_decay", "np.float32(0.4)"),
    setting("lr", "1"),
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
        kind = KINDS[name]
        more = options if device != "cpu" else {}
        super().__init__(device, lambda parameters: kind(parameters, lr=rate, **more))


for which, place, more in (
    ("Adam", "device", {"capturable": True, "foreach": True}),
    ("SGD", "CPU", {}),
):
    trains(
        f"{which}'s lr as a {place} tensor, {list(more)}",
        "lr, learning rate, CPU tensor",
        "None",
        "for group in t.optimizer.param_groups:\n    group['lr'].fill_(0.4)",
        setting("lr", "torch.tensor(0.1, device=group['lr'].device)"),
        kind=functools.partial(OnDevice, which, place, more),
    )
