"""Every hyperparameter of every optimizer of `torch.optim`, as floats and as other kinds."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch

from tests.torch_bridge.engine.capture.changes.worlds import Trainer, linear, trains

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
    "Muon": {"lr": 0.1, "weight_decay": 0.01},
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

LOOSE = {"LBFGS": 2e-3}
"""Relative tolerances: LBFGS divides by differences."""

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


def _sets(name: str, value: Any) -> Any:
    def edit(trainer: Trainer) -> None:
        for group in trainer.optimizer.param_groups:
            group[name] = value

    return edit


def _make(name: str, **more: Any) -> Any:
    kind = every_optimizer()[name]
    if "foreach" in inspect.signature(kind).parameters:
        more["foreach"] = True  # as is the default on `jax`; what it leaves in gradients differs

    def make(parameters: Any) -> Any:
        mine = list(parameters)
        chosen = {**OPTIONS[name], **more}
        if name in CAPTURABLE and mine[0].device.type != "cpu":
            chosen["capturable"] = True
        return kind(mine, **chosen)

    return make


def _register() -> None:
    probe = [torch.nn.Parameter(torch.ones(2, 2))]
    for name, kind in every_optimizer().items():
        defaults = kind(probe, **OPTIONS[name]).defaults
        for option, before in defaults.items():
            if option in NOT_CHANGED:
                continue
            after = SPECIAL.get((name, option), CHANGED[option])
            if option == "decoupled_weight_decay":
                after = not before
            more: dict[str, Any] = {}
            if (name, option) == ("SGD", "dampening"):  # nesterov wants none
                more = {"nesterov": False}
            trains(
                f"{name}'s {option}",
                _make(name, **more),
                _sets(option, after),
                _sets(option, before),
                option,
                *_REFUSED.get(name, ()),
                kind=KINDS.get(name, Trainer),
                rtol=LOOSE.get(name, 1e-4),
                against=AGAINST.get(name, "cpu"),
            )


_REFUSED: dict[str, tuple[str, ...]] = {
    "LBFGS": ("LBFGS", "value of a tensor"),
    "Adafactor": ("Adafactor", "a number that changes from step to step"),
    "ASGD": ("ASGD", "a number that changes from step to step"),
}
"""Optimizers that compiled steps refuse as such, by the line where Python decides anew."""

_register()

# --- Hyperparameters that are no Python floats ---------------------------------------------------

for what, one, other in (
    ("np.float32", np.float32(0.1), np.float32(0.4)),
    ("np.float64", np.float64(0.1), np.float64(0.4)),
    ("int", 1, 0),
):
    for which in ("SGD", "Adam"):
        for option in ("lr", "weight_decay"):
            trains(
                f"{which}'s {option} as {what}",
                _make(which, **{option: one}),
                _sets(option, other),
                _sets(option, one),
                option,
                rtol=1e-4,
            )


def _list_betas(value: list[float]) -> Any:
    return _sets("betas", value)


trains(
    "Adam's betas as a list replaced",
    _make("Adam"),
    _sets("betas", [0.5, 0.6]),
    _sets("betas", [0.9, 0.999]),
    "betas",
    rtol=1e-4,
)


def _with_list(parameters: Any) -> Any:
    optimizer = _make("Adam")(parameters)
    for group in optimizer.param_groups:
        group["betas"] = [0.9, 0.999]
    return optimizer


def _item(value: float) -> Any:
    def edit(trainer: Trainer) -> None:
        for group in trainer.optimizer.param_groups:
            group["betas"][0] = value

    return edit


trains("an item of Adam's list of betas", _with_list, _item(0.5), _item(0.9), "betas", rtol=1e-4)


class OnDevice(Trainer):
    """Its learning rate is a tensor on the device of the model; `options` go to the optimizer."""

    def __init__(self, device: str, make: Any):
        super().__init__(device, lambda parameters: make(parameters, device))


def _tensor_rate(name: str, own: bool, **more: Any) -> Any:
    def make(parameters: Any, device: str) -> Any:
        rate = torch.tensor(0.1, device=device if own else "cpu")
        return every_optimizer()[name](parameters, lr=rate, **(more if device != "cpu" else {}))

    return make


def _filled(value: float) -> Any:
    def edit(trainer: Trainer) -> None:
        for group in trainer.optimizer.param_groups:
            group["lr"].fill_(value)

    return edit


def _replaced(value: float) -> Any:
    def edit(trainer: Trainer) -> None:
        for group in trainer.optimizer.param_groups:
            group["lr"] = torch.tensor(value, device=group["lr"].device)

    return edit


for which, own, more in (
    ("Adam", True, {"capturable": True, "foreach": True}),
    ("AdamW", True, {"fused": True}),
    ("SGD", True, {"fused": True}),
    ("SGD", False, {}),
    ("Adam", False, {}),
):
    place = "device" if own else "CPU"
    how = "".join(f", {key}" for key in more)
    for verb, edit in (("filled", _filled), ("replaced", _replaced)):
        trains(
            f"{which}'s lr as a {place} tensor {verb}{how}",
            _tensor_rate(which, own, **more),
            edit(0.4),
            edit(0.1),
            "lr",
            "learning rate",
            "CPU tensor",
            kind=OnDevice,
            rtol=1e-4,
        )
