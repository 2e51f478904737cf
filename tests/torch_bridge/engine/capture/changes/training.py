"""Changes around a training step: groups, state, schedules, scalers, hooks."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tests.torch_bridge.engine.capture.changes.worlds import (
    Trainer,
    linear,
    state_of,
    trains,
)

optim = torch.optim


def sgd(parameters: Any) -> optim.Optimizer:
    return optim.SGD(parameters, lr=0.1)


def momentum(parameters: Any) -> optim.Optimizer:
    return optim.SGD(parameters, lr=0.1, momentum=0.5)


def adam(parameters: Any) -> optim.Optimizer:
    return optim.Adam(parameters, lr=0.1)


def nothing(_trainer: Any) -> None:
    pass


# --- Groups, parameters, other optimizers --------------------------------------------------------


class WithExtra(Trainer):
    """A model with a parameter that no optimizer has at first."""

    def __init__(self, device: str, make: Any):
        super().__init__(device, make)
        self.extra = torch.nn.Parameter(torch.full((4,), 0.5, device=device))
        self.model = torch.nn.Sequential(self.model, Times(self.extra))


class Times(torch.nn.Module):
    def __init__(self, factor: torch.nn.Parameter):
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def _add_group(trainer: Any) -> None:
    trainer.optimizer.add_param_group({"params": [trainer.extra], "lr": 0.3})


def _pop_group(trainer: Any) -> None:
    trainer.optimizer.param_groups.pop()
    trainer.optimizer.state.pop(trainer.extra, None)


for title, make in (("SGD", sgd), ("SGD with momentum", momentum), ("Adam", adam)):
    trains(
        f"a parameter group added to {title}",
        make,
        _add_group,
        _pop_group,
        "param_groups",
        "group",
        "zero_grad",  # which no longer clears what has left the group
        kind=WithExtra,
        rtol=1e-4,
    )

    def _replaced(trainer: Any, make: Any = make) -> None:
        trainer.optimizer = type(trainer.optimizer)(trainer.model.parameters(), lr=0.4)

    trains(
        f"{title} replaced in the same attribute",
        make,
        _replaced,
        nothing,
        "optimizer",
        rtol=1e-4,
    )

    def _parameter(trainer: Any) -> None:
        """Swap a parameter in the model and in the optimizer."""
        old = trainer.model[0].weight
        new = torch.nn.Parameter(old.detach() * 1.5)
        trainer.model[0].weight = new
        group = trainer.optimizer.param_groups[0]
        group["params"] = [new if one is old else one for one in group["params"]]
        trainer.optimizer.state.pop(old, None)

    trains(
        f"a parameter swapped in model and {title}",
        make,
        _parameter,
        nothing,
        "weight",
        "params",
        rtol=1e-4,
    )


def _to_adam(trainer: Any) -> None:
    trainer.optimizer = adam(trainer.model.parameters())


trains("SGD replaced by Adam", sgd, _to_adam, nothing, "optimizer", rtol=1e-4)


def _new_model(trainer: Any) -> None:
    trainer.model = torch.nn.Sequential(linear(3, bias=True), torch.nn.Tanh()).to(trainer.device)
    trainer.optimizer = sgd(trainer.model.parameters())


trains("model and optimizer replaced", sgd, _new_model, nothing, "model", "optimizer")


def _freeze(value: bool) -> Any:
    return lambda trainer: trainer.model[0].weight.requires_grad_(value)


trains("a parameter frozen", momentum, _freeze(False), _freeze(True), "requires_grad", "weight")


def _frozen_without_gradient(trainer: Any) -> None:
    trainer.model[0].weight.requires_grad_(False)
    trainer.model[0].weight.grad = None


trains(
    "a parameter frozen with Adam",
    adam,
    _frozen_without_gradient,
    _freeze(True),
    "requires_grad",
    "weight",
    rtol=1e-4,
)


# --- State ---------------------------------------------------------------------------------------


def _state(trainer: Any) -> Any:
    return trainer.optimizer.state[trainer.model[0].weight]


def _zero_average(trainer: Any) -> None:
    _state(trainer)["exp_avg"].zero_()


trains("Adam's state changed in place", adam, _zero_average, nothing, "exp_avg", rtol=1e-4)


def _new_average(trainer: Any) -> None:
    _state(trainer)["exp_avg"] = _state(trainer)["exp_avg"].clone() * 3


trains("a tensor of Adam's state replaced", adam, _new_average, nothing, "exp_avg", rtol=1e-4)


def _later(trainer: Any) -> None:
    _state(trainer)["step"] += 50


trains("Adam's step count", adam, _later, nothing, "step", rtol=1e-4)


def _later_replaced(trainer: Any) -> None:
    _state(trainer)["step"] = torch.tensor(50.0)


trains("Adam's step count replaced", adam, _later_replaced, nothing, "step", rtol=1e-4)


def _cleared(trainer: Any) -> None:
    trainer.optimizer.state.clear()


for title, make in (("SGD with momentum", momentum), ("Adam", adam)):
    trains(
        f"the state of {title} cleared",
        make,
        _cleared,
        _cleared,
        "state",
        "momentum_buffer",
        "step",
        rtol=1e-4,
    )


def _reloaded(trainer: Any) -> None:
    state = copy.deepcopy(trainer.optimizer.state_dict())
    state["param_groups"][0]["lr"] = 0.3
    for one in state["state"].values():
        for name, value in one.items():
            if name != "step" and value is not None:
                one[name] = value * 2
    trainer.optimizer.load_state_dict(state)


for title, make in (("SGD with momentum", momentum), ("Adam", adam)):
    trains(
        f"load_state_dict of {title}",
        make,
        _reloaded,
        nothing,
        "state",
        "momentum_buffer",
        "step",
        "lr",
        rtol=1e-4,
    )


# --- Gradients -----------------------------------------------------------------------------------


class Accumulating(Trainer):
    """It keeps gradients from step to step unless told otherwise."""

    clear = True
    clip: float | None = None

    def step(self, x: torch.Tensor) -> torch.Tensor:
        if self.clear:
            self.optimizer.zero_grad()
        loss = self.model(x).square().sum()
        loss.backward()
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        return loss.detach()


def _sets(name: str, value: Any) -> Any:
    return lambda trainer: setattr(trainer, name, value)


trains(
    "whether gradients are cleared",
    sgd,
    _sets("clear", False),
    _sets("clear", True),
    "clear",
    kind=Accumulating,
)
trains(
    "the norm that gradients are clipped to",
    sgd,
    _sets("clip", 0.1),
    _sets("clip", 0.3),
    "clip",
    kind=Accumulating,
)


class Clipping(Accumulating):
    clip = 1.0


trains(
    "another norm that gradients are clipped to",
    sgd,
    _sets("clip", 0.1),
    _sets("clip", 1.0),
    "clip",
    kind=Clipping,
)


class Dropping(Accumulating):
    clear, keeps = False, True


def _dropped(trainer: Any) -> None:
    trainer.optimizer.zero_grad()


trains("gradients dropped between calls", sgd, _dropped, _dropped, "grad", kind=Dropping)


def _zeroed(trainer: Any) -> None:
    trainer.optimizer.zero_grad(set_to_none=False)


trains("gradients zeroed between calls", sgd, _zeroed, _zeroed, "grad", kind=Dropping)


# --- Schedules -----------------------------------------------------------------------------------

SCHEDULES: dict[str, Any] = {
    "StepLR": lambda o: optim.lr_scheduler.StepLR(o, 1, 0.5),
    "CosineAnnealingLR": lambda o: optim.lr_scheduler.CosineAnnealingLR(o, 6),
    "OneCycleLR": lambda o: optim.lr_scheduler.OneCycleLR(o, 0.4, total_steps=20),
    "LambdaLR": lambda o: optim.lr_scheduler.LambdaLR(o, lambda epoch: 1 / (epoch + 1)),
}


class Scheduled(Trainer):
    """A scheduler stands beside the optimizer."""

    def __init__(self, device: str, make: Any, schedule: str):
        super().__init__(device, make)
        self.scheduler = SCHEDULES[schedule](self.optimizer)


def _advance(trainer: Any) -> None:
    for _ in range(3):
        trainer.scheduler.step()


for schedule in SCHEDULES:
    trains(
        f"steps of {schedule} between calls",
        momentum,
        _advance,
        _advance,
        "lr",
        kind=lambda device, make, schedule=schedule: Scheduled(device, make, schedule),
    )


class Inside(Scheduled):
    """The scheduler steps inside the step."""

    def step(self, x: torch.Tensor) -> torch.Tensor:
        loss = super().step(x)
        self.scheduler.step()
        return loss


trains(
    "a scheduler that steps inside the step",
    sgd,
    nothing,
    nothing,
    "learning rate",
    "scheduler",
    kind=lambda device, make: Inside(device, make, "StepLR"),
)


class Averaging(Trainer):
    """Averages of the weights with a Python condition on their count."""

    def __init__(self, device: str, make: Any):
        super().__init__(device, make)
        self.average = torch.optim.swa_utils.AveragedModel(self.model)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        loss = super().step(x)
        self.average.update_parameters(self.model)
        return loss

    def state(self) -> Any:
        return {**super().state(), "average": state_of(self.average)}


trains(
    "averages of weights in the step",
    sgd,
    nothing,
    nothing,
    "n_averaged",
    "condition",
    "value of a tensor",
    "swa_utils",
    kind=Averaging,
)


# --- Scalers -------------------------------------------------------------------------------------


class Scaling(Trainer):
    """Training with a `GradScaler`."""

    def __init__(self, device: str, make: Any):
        super().__init__(device, make)
        self.scaler = torch.amp.GradScaler(device, init_scale=8.0, growth_interval=2)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.model(x).square().sum()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    def state(self) -> Any:
        scaler: Any = self.scaler
        return {**super().state(), "scale": scaler._scale, "grown": scaler._growth_tracker}


def fused(parameters: Any) -> optim.Optimizer:
    return optim.Adam(parameters, lr=0.1, fused=True)


SCALER: dict[str, tuple[Any, Any]] = {
    "scale": (lambda t: t.scaler.update(2.0), nothing),
    "growth interval": (
        lambda t: t.scaler.set_growth_interval(1),
        lambda t: t.scaler.set_growth_interval(5),
    ),
    "growth factor": (
        lambda t: t.scaler.set_growth_factor(4.0),
        lambda t: t.scaler.set_growth_factor(2.0),
    ),
    "state": (
        lambda t: t.scaler.load_state_dict({**t.scaler.state_dict(), "scale": 32.0}),
        nothing,
    ),
    "enabled": (
        lambda t: setattr(t.scaler, "_enabled", False),
        lambda t: setattr(t.scaler, "_enabled", True),
    ),
}
for title, (edit, back) in SCALER.items():
    trains(
        f"a GradScaler's {title}",
        fused,
        edit,
        back,
        "scale",
        "growth",
        "_enabled",
        kind=Scaling,
        rtol=1e-4,
    )

trains(
    "a GradScaler's scale without fused",
    adam,
    SCALER["scale"][0],
    nothing,
    "scale",
    "item",
    "GradScaler",
    kind=Scaling,
    rtol=1e-4,
)


# --- Hooks of optimizers -------------------------------------------------------------------------


def _doubles_gradients(optimizer: Any, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for one in group["params"]:
            one.grad.mul_(2)


def _shrinks(optimizer: Any, args: Any, kwargs: Any) -> None:
    with torch.no_grad():
        for group in optimizer.param_groups:
            for one in group["params"]:
                one.mul_(0.5)


OPTIMIZER_HOOKS: dict[str, Any] = {
    "pre": lambda t: t.optimizer.register_step_pre_hook(_doubles_gradients),
    "post": lambda t: t.optimizer.register_step_post_hook(_shrinks),
    "global pre": lambda t: register_optimizer_step_pre_hook(_doubles_gradients),
    "global post": lambda t: register_optimizer_step_post_hook(_shrinks),
}


def _kept(register: Any) -> tuple[Any, Any]:
    handles: list[Any] = []
    return (
        lambda trainer: handles.append(register(trainer)),
        lambda trainer: handles.pop(0).remove(),
    )


for title, register in OPTIMIZER_HOOKS.items():
    trains(f"a {title} hook of an optimizer", sgd, *_kept(register), "hook")

trains(
    "the step of an optimizer replaced",
    sgd,
    lambda t: setattr(t.optimizer, "step", lambda: None),
    lambda t: delattr(t.optimizer, "step"),
    "step",
    "outlive",
)


# --- Optimizers of users -------------------------------------------------------------------------


class Counting(optim.Optimizer):
    """Counts its steps in a Python int."""

    def __init__(self, parameters: Any, lr: float = 0.4):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                p.add_(p.grad, alpha=-group["lr"] / state["step"])


class CountingItself(optim.Optimizer):
    """Counts its steps in an attribute."""

    def __init__(self, parameters: Any, lr: float = 0.4):
        super().__init__(parameters, {"lr": lr})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] / self.steps)


class Coefficients(optim.Optimizer):
    """Reads a number of its own that is in no group."""

    def __init__(self, parameters: Any, lr: float = 0.4):
        super().__init__(parameters, {"lr": lr})
        self.decay = 0.1

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(1 - self.decay).add_(p.grad, alpha=-group["lr"])


trains("attack 4: steps counted in a Python int of the state", Counting, nothing, nothing, "step")
trains("attack 4: steps counted in an attribute", CountingItself, nothing, nothing, "steps")
trains(
    "an attribute of an optimizer of one's own",
    Coefficients,
    lambda t: setattr(t.optimizer, "decay", 0.5),
    lambda t: setattr(t.optimizer, "decay", 0.1),
    "decay",
)


class Fused(Trainer):
    """SGD(fused=True) with its rate in a tensor on the device, and a scheduler."""

    def __init__(self, device: str, make: Any):
        fused = {} if device == "cpu" else {"fused": True}
        super().__init__(
            device, lambda p: optim.SGD(p, lr=torch.tensor(0.1, device=device), **fused)
        )
        self.scheduler = optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)


def _loaded_and_scheduled(trainer: Any) -> None:
    trainer.optimizer.load_state_dict(copy.deepcopy(trainer.optimizer.state_dict()))
    trainer.scheduler.step()


trains(
    "attack 6a: tensor lr after load_state_dict and ExponentialLR",
    sgd,
    _loaded_and_scheduled,
    _loaded_and_scheduled,
    "lr",
    "learning rate",
    kind=Fused,
)
