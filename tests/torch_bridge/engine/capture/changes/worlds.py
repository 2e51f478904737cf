"""What a program has between two calls of a step, what it changes there, and how a case is run.

A case makes a `World` on a device: a step, an edit, and the edit back. There are three kinds:

- `reads`: the step is a function of a tensor of 4 x 4 that reads something besides. As a layer of
  `scan_layers` it follows a product; in `gradient_accumulation` it is inside the loss.
- `modules`: the step is a forward and backward pass of a model, and the edit changes the model.
- `trains`: the step is a whole training step, and the edit changes model, optimizer, or what is
  around them.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

import isoshard.torch_bridge as xs
from isoshard.torch_bridge.torch_xla.experimental.gradient_accumulation import gradient_accumulation

BY_DYNAMO = "torch.compile has no guard for it, on any device and with any backend"

OUTSIDE = {
    "scan": "it is read outside of the layers, where the code runs in every call",
    "accumulate": "it is read outside of the loop, where the code runs in every call",
}
"""Why a whole training step has no scanned and no accumulated form."""

OUTSIDE_OF_MODELS = {
    **OUTSIDE,
    "dynamo": "torch.compile(model) compiles no optimizer: its code runs in every call",
}
"""The same where `torch.compile` would be given the step of an optimizer."""


@dataclasses.dataclass
class World:
    """A program between two calls.

    Attributes:
        step: what is called, with `x` and the extra arguments.
        edit: changes something.
        back: changes it back.
        extra: arguments behind `x`, looked up at each call.
        state: numbers and tensors that must be those of the CPU after each call.
        close: called at the end.
        model: if there is one, `torch.compile` gets it, and not the step.
    """

    step: Callable[..., Any]
    edit: Callable[[], Any]
    back: Callable[[], Any]
    extra: Callable[[], tuple[Any, ...]] = tuple
    state: Callable[[], Any] = dict
    close: Callable[[], Any] = tuple
    model: list[Any] | None = None

    def dynamo(self, backend: str) -> None:
        """Compile the model, or the step."""
        if self.model is not None:
            self.model[0] = torch.compile(self.model[0], backend=backend)
        else:
            self.step = torch.compile(self.step, backend=backend)


@dataclasses.dataclass(frozen=True)
class Case:
    """A row of the matrix.

    Attributes:
        name: of the change.
        make: `(device, mode) -> World`; on the device "cpu" it is what the mode must equal.
        names: an error must contain one of them.
        against: "cpu" (torch's eager result), "lazy" (results of the `jax` device, step by step) or
            "pattern" (which calls have equal results, as on the CPU).
        without: modes that the case has no form in, and why.
        rtol: relative tolerance.
        frozen: why dynamo itself does not see the edit.
        unseen: why no call of the reference shows the edit.
    """

    name: str
    make: Callable[[str, str], World]
    names: tuple[str, ...]
    against: str = "cpu"
    without: dict[str, str] = dataclasses.field(default_factory=dict)
    rtol: float = 1e-5
    frozen: str = ""
    unseen: str = ""


CASES: list[Case] = []


def reads(
    name: str,
    *names: str,
    over: Iterable[Any] | None = None,
    once: bool = False,
    frozen_for: Sequence[str] = (),
    **options: Any,
) -> Callable[[Callable[..., World]], Callable[..., World]]:
    """Register a function `(device) -> World`, or `(device, one) -> World` for each of `over`.

    Args:
        name: of the change.
        *names: see `Case`.
        over: variants.
        once: give loops one layer, and one batch: their Python code runs once for all of them, so
            what it does to Python objects is not done for each.
        frozen_for: variants that dynamo itself does not see.
        **options: see `Case`.
    """

    def register(make: Callable[..., World]) -> Callable[..., World]:
        for one in [()] if over is None else [(item,) for item in over]:

            def build(device: str, mode: str, one: Any = one) -> World:
                return _read_in(mode, device, lambda: make(device, *one), 1 if once else 2)

            full = f"{name}: {one[0]}" if one else name
            frozen = {"frozen": BY_DYNAMO} if one and one[0] in frozen_for else {}
            CASES.append(Case(full, build, names, **{**options, **frozen}))
        return make

    return register


def _read_in(mode: str, device: str, make: Callable[[], World], times: int) -> World:
    """The world, with its step as a layer, or in a loss."""
    models = [linear(seed).to(device) for seed in (1, 2)[:times]]  # before the case sets seeds
    world = make()
    if mode == "scan":
        blocks = xs.scan_layers(
            models, stacked=False, call=lambda layer, x, *extra: world.step(layer(x), *extra)
        )
        return dataclasses.replace(world, step=blocks)
    if mode == "accumulate":
        (model, *_), before = models, world.state

        def step(x: torch.Tensor, *extra: Any) -> torch.Tensor:
            model.zero_grad()
            return accumulated(lambda one: world.step(model(one), *extra).sum(), x, model, times)

        return dataclasses.replace(
            world, step=step, state=lambda: {**before(), "gradient": model.weight.grad}
        )
    return world


def accumulated(
    loss: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, model: Any, times: int = 2
) -> torch.Tensor:
    """The mean loss over batches, with gradients, as a loop or in turn."""
    batches = torch.stack([x, x + 0.5][:times])
    if x.device.type != "cpu":
        return gradient_accumulation(loss, (batches,), model)
    total = torch.zeros(())
    for one in batches:
        part = loss(one) / times
        if part.requires_grad:
            part.backward()
        total = total + part.detach()
    return total


def modules(
    name: str,
    make: Callable[[], torch.nn.Module],
    edit: Callable[[Any], Any],
    back: Callable[[Any], Any],
    *names: str,
    once: bool = False,
    **options: Any,
) -> None:
    """Register a change of a model.

    Args:
        name: of the change.
        make: the model, on the CPU, with fixed numbers; it takes and returns 4 x 4.
        edit: changes it.
        back: changes it back.
        *names: see `Case`.
        once: see `reads`.
        **options: see `Case`.
    """

    def build(device: str, mode: str) -> World:
        return _model_in(mode, device, make, edit, back, 1 if once else 2)

    CASES.append(Case(name, build, names, **options))


def _model_in(mode: str, device: str, make: Any, edit: Any, back: Any, times: int) -> World:
    layers = [make().to(device) for _ in range(times if mode == "scan" else 1)]
    model: Any = layers[0]
    if mode == "scan":
        model = xs.scan_layers(layers, stacked=False)

    def train(x: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        if mode == "accumulate":
            return accumulated(lambda one: run[0](one).square().sum(), x, model, times)
        loss = run[0](x).square().sum()
        if loss.requires_grad:
            loss.backward()
        return loss.detach()

    run = [model]
    return World(
        train,
        lambda: [edit(layer) for layer in layers],
        lambda: [back(layer) for layer in layers],
        state=lambda: {"models": [state_of(layer, gradients=True) for layer in layers]},
        model=run,
    )


class Trainer:
    """A model, its optimizer, and a step of training.

    Args:
        device: of the model.
        make: the optimizer, from the parameters.

    Attributes:
        keeps: whether gradients are there after a step. A compiled step that clears and uses them
            keeps none, as its documentation says.
    """

    keeps = False

    def __init__(self, device: str, make: Callable[[Any], torch.optim.Optimizer]):
        self.device = device
        self.model: Any = torch.nn.Sequential(linear(1, bias=True), torch.nn.Tanh()).to(device)
        self.optimizer = make(self.model.parameters())

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.model(x).square().sum()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def state(self) -> Any:
        return {
            "model": state_of(self.model, gradients=self.keeps),
            "optimizer": copy.deepcopy(self.optimizer.state_dict()["state"]),
        }


def trains(
    name: str,
    make: Callable[[Any], torch.optim.Optimizer],
    edit: Callable[[Any], Any],
    back: Callable[[Any], Any],
    *names: str,
    kind: Callable[..., Trainer] = Trainer,
    **options: Any,
) -> None:
    """Register a change of a `Trainer` (what `edit` and `back` get)."""

    def build(device: str, mode: str) -> World:
        trainer = kind(device, make)
        return World(
            trainer.step, lambda: edit(trainer), lambda: back(trainer), state=trainer.state
        )

    CASES.append(Case(name, build, names, **{"without": OUTSIDE_OF_MODELS, **options}))


def linear(seed: int, bias: bool = False) -> torch.nn.Linear:
    """A layer of 4 x 4 with numbers of its own."""
    layer = torch.nn.Linear(4, 4, bias=bias)
    with torch.no_grad():
        layer.weight.copy_(torch.sin(torch.arange(16.0) * (seed + 0.3)).reshape(4, 4) * 0.5)
        if bias:
            layer.bias.copy_(torch.arange(4.0) / 8 - 0.2)
    return layer


def state_of(module: torch.nn.Module, gradients: bool = False) -> Any:
    """Parameters, buffers, modes, and, if asked for, gradients."""
    kept = dict(module.named_parameters()) if gradients else {}
    return {
        "tensors": dict(module.named_parameters()) | dict(module.named_buffers()),
        "gradients": {name: one.grad for name, one in kept.items()},
        "training": [one.training for one in module.modules()],
    }


def both(put: Callable[[Any], Any], first: Any, second: Any) -> tuple[Any, Any]:
    """An edit and the edit back that put one of two things somewhere."""
    return (lambda: put(second)), (lambda: put(first))
