"""Changes around a training step: groups, state, schedules, scalers, hooks."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch.optim import optimizer as of_torch

from tests.torch_bridge.engine.capture.changes import worlds
from tests.torch_bridge.engine.capture.changes.worlds import Trainer, linear, state_of, table

optim = torch.optim
schedules = optim.lr_scheduler


def sgd(parameters: Any) -> optim.Optimizer:
    return optim.SGD(parameters, lr=0.1)


def momentum(parameters: Any) -> optim.Optimizer:
    return optim.SGD(parameters, lr=0.1, momentum=0.5)


def adam(parameters: Any) -> optim.Optimizer:
    return optim.Adam(parameters, lr=0.1)


def fused(parameters: Any) -> optim.Optimizer:
    return optim.Adam(parameters, lr=0.1, fused=True)


class WithExtra(Trainer):
    """A model with a parameter that no optimizer has at first."""

    def __init__(self, device: str, make: Any):
        super().__init__(device, make)
        self.model.register_parameter("extra", torch.nn.Parameter(torch.ones(4, device=device)))
        self.model.register_forward_hook(lambda model, args, result: result * model.extra)


class Accumulating(Trainer):
    """It may keep gradients from step to step, and clip them."""

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


class Dropping(Accumulating):
    """It keeps gradients from step to step."""

    clear, keeps = False, True


class Scheduled(Trainer):
    """A scheduler stands beside the optimizer."""

    def __init__(self, schedule: Any, device: str, make: Any):
        super().__init__(device, make)
        self.scheduler = schedule(self.optimizer)


class Inside(Scheduled):
    """The scheduler steps inside the step."""

    def step(self, x: torch.Tensor) -> torch.Tensor:
        loss = super().step(x)
        self.scheduler.step()
        return loss


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


class Counting(optim.Optimizer):
    """Counts its steps in a Python int of its state, or in an attribute; has a number of its own.

    Args:
        parameters: to train.
        own: whether the count is an attribute.
        counts: whether it divides by the count.
    """

    def __init__(self, parameters: Any, own: bool = False, counts: bool = True):
        super().__init__(parameters, {"lr": 0.4})
        self.own, self.counts, self.steps, self.decay = own, counts, 0, 0.1

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += self.own
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if self.counts and not self.own:
                    state["step"] = state.get("step", 0) + 1
                count = self.steps if self.own else state.get("step", 1)
                p.mul_(1 - self.decay).add_(p.grad, alpha=-group["lr"] / count)


def swapped(t: Any) -> None:
    """Swap a parameter in the model and in the optimizer."""
    old = t.model[0].weight
    new = torch.nn.Parameter(old.detach() * 1.5)
    t.model[0].weight = new
    group = t.optimizer.param_groups[0]
    group["params"] = [new if one is old else one for one in group["params"]]
    t.optimizer.state.pop(old, None)


def reloaded(t: Any) -> None:
    """Give the optimizer its state times two, and another rate."""
    state = copy.deepcopy(t.optimizer.state_dict())
    state["param_groups"][0]["lr"] = 0.3
    for one in state["state"].values():
        for name, value in one.items():
            if name != "step" and value is not None:
                one[name] = value * 2
    t.optimizer.load_state_dict(state)


def doubles(optimizer: Any, args: Any, kwargs: Any) -> None:
    """A hook: gradients times two."""
    for group in optimizer.param_groups:
        for one in group["params"]:
            one.grad.mul_(2)


def shrinks(optimizer: Any, args: Any, kwargs: Any) -> None:
    """A hook: parameters by half."""
    with torch.no_grad():
        for group in optimizer.param_groups:
            for one in group["params"]:
                one.mul_(0.5)


def by_half(optimizer: Any) -> Any:
    """A schedule."""
    return schedules.StepLR(optimizer, 1, 0.5)


KNOWN = {**globals(), "linear": linear, "of_torch": of_torch}
trains = functools.partial(worlds.trains, known=KNOWN, rtol=1e-4)

# --- Groups, parameters, other optimizers --------------------------------------------------------

trains(
    "a parameter group added to SGD with momentum",
    "param_groups, group, zero_grad",  # which no longer clears what has left the group
    "momentum",
    "t.optimizer.add_param_group({'params': [t.model.extra], 'lr': 0.3})",
    "t.optimizer.param_groups.pop()\nt.optimizer.state.pop(t.model.extra, None)",
    kind=WithExtra,
)
trains("a parameter swapped in model and Adam", "weight, params", "adam", "swapped(t)")
trains(
    "the state of Adam loaded, then cleared",
    "state, momentum_buffer, step, lr",
    "adam",
    "reloaded(t)",
    "t.optimizer.state.clear()",
)
table(
    r"""
the optimizer replaced by one of its kind, and by another | optimizer | sgd |
    t.optimizer = optim.SGD(t.model.parameters(), lr=0.4) | t.optimizer = adam(t.model.parameters())
model and optimizer replaced | model, optimizer | sgd |
    t.model = torch.nn.Sequential(linear(3, bias=True), torch.nn.Tanh()).to(t.device)\n
    t.optimizer = sgd(t.model.parameters())
# State
a tensor of Adam's state changed in place, and replaced | exp_avg | adam |
    t.optimizer.state[t.model[0].weight]['exp_avg'].zero_() |
    t.optimizer.state[t.model[0].weight]['exp_avg'] =
    t.optimizer.state[t.model[0].weight]['exp_avg'].clone() * 3
Adam's step count changed in place, and replaced | step | adam |
    t.optimizer.state[t.model[0].weight]['step'] += 50 |
    t.optimizer.state[t.model[0].weight]['step'] = torch.tensor(50.0)
# Gradients
whether gradients are cleared | clear | sgd | t.clear = False | t.clear = True | ! kind=Accumulating
the norm that gradients are clipped to | clip | sgd | t.clip = 1.0 | t.clip = 0.1 |
    ! kind=Accumulating
gradients dropped, and zeroed, between calls | grad | sgd | t.optimizer.zero_grad() |
    t.optimizer.zero_grad(set_to_none=False) | ! kind=Dropping
""",
    trains,
)

# --- Schedules -----------------------------------------------------------------------------------

trains(
    "steps of OneCycleLR between calls",
    "lr",
    "momentum",
    "for _ in range(3):\n    t.scheduler.step()",
    "t.scheduler.step()",
    kind=functools.partial(Scheduled, lambda o: schedules.OneCycleLR(o, 0.4, total_steps=20)),
)
table(
    r"""
a scheduler that steps inside the step | learning rate, scheduler | sgd |
    ! kind=functools.partial(Inside, by_half)
averages of weights in the step | n_averaged, condition, value of a tensor, swa_utils | sgd |
    ! kind=Averaging
# Scalers
a GradScaler's scale and growth | scale, growth | fused | t.scaler.update(2.0) |
    t.scaler.set_growth_interval(1) | ! kind=Scaling
a GradScaler's scale without fused | scale, item, GradScaler | adam | t.scaler.update(2.0) |
    ! kind=Scaling
""",
    trains,
)

# --- Hooks, and optimizers of users --------------------------------------------------------------

for title, hook in {
    "post": "t.optimizer.register_step_post_hook(shrinks)",
    "global pre": "of_torch.register_optimizer_step_pre_hook(doubles)",
}.items():
    trains(f"a {title} hook of an optimizer", "hook", "sgd", f"handle = {hook}", "handle.remove()")
table(
    r"""
the step of an optimizer replaced | step, outlive | sgd | t.optimizer.step = lambda: None |
    del t.optimizer.step
steps counted in a Python int of the state | step | Counting
steps counted in an attribute | steps | functools.partial(Counting, own=True)
an attribute of an optimizer of one's own | decay | functools.partial(Counting, counts=False) |
    t.optimizer.decay = 0.5 | t.optimizer.decay = 0.1
""",
    trains,
)
