"""Models of equal layers, trained with and without `repeat="auto"` from the same start."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import isoshard.torch_bridge as xs

WIDTH, ROWS = 8, 8


class Layer(nn.Module):
    """A residual layer with a norm, a product, and dropout."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    """Layers between an input and an output of other shapes."""

    def __init__(self, layers: int, dropout: float = 0.0):
        super().__init__()
        self.first = nn.Linear(3, WIDTH)
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(layers))
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


class Training:
    """A model, its optimizer, a compiled step and one of evaluation.

    Args:
        repeat: as of `xs.compile`.
        layers: how many.
        dropout: of each.
        optimizer: makes the optimizer; SGD by default.
        loss: of the model and a batch, inside the step.
        before: called with the model before the optimizer's step.
        place: is given the model before the optimizer is made.
        device: of the batches; on the CPU nothing is compiled.
    """

    def __init__(
        self,
        repeat: Any,
        *,
        layers: int = 3,
        dropout: float = 0.0,
        optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
        loss: Callable[[nn.Module, torch.Tensor], torch.Tensor] | None = None,
        before: Callable[[nn.Module], Any] = lambda model: None,
        place: Callable[[nn.Module], Any] | None = None,
        device: str = "jax",
    ):
        torch.manual_seed(0)
        self.model = Model(layers, dropout)
        place(self.model) if place else self.model.to(device)
        self.device = device
        make = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.05))
        self.optimizer = make(self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        loss_of = loss or (lambda model, x: model(x).square().mean())

        def step(x: torch.Tensor) -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = loss_of(self.model, x)
            loss.backward()
            before(self.model)
            self.optimizer.step()
            return loss.detach()

        def evaluate(x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                return self.model(x).mean()

        self.step, self.evaluate = step, evaluate
        if device != "cpu":
            self.step, self.evaluate = (xs.compile(one, repeat=repeat) for one in (step, evaluate))

    def run(self, steps: int, between: Callable[[int, Training], Any] | None = None) -> list[Any]:
        """Train; gives the losses, parameters and optimizer state.

        Args:
            steps: how many.
            between: called after each step, with its number.
        """
        torch.manual_seed(1)
        found: list[Any] = []
        for number in range(steps):
            x = torch.randn(ROWS, 3).to(self.device)
            found.append(self.step(x).cpu().clone())
            self.schedule.step()
            if between is not None:
                said = between(number, self)
                found += [] if said is None else [said]
        return [*found, *self.state()]

    def state(self) -> list[torch.Tensor]:
        """Parameters and optimizer state."""
        states = copy.copy(self.optimizer.state_dict()["state"]).values()
        kept = [value for state in states for value in state.values()]
        kept = [*self.model.parameters(), *(one for one in kept if isinstance(one, torch.Tensor))]
        return [one.detach().cpu().clone() for one in kept]


def compare(
    steps: int,
    between: Callable[[int, Training], Any] | None = None,
    laid: Callable[[nn.Module], Any] | None = None,
    **options: Any,
) -> Training:
    """Train with and without; the one with, once all they found is close.

    The one without is on the CPU, where nothing is drawn.

    Args:
        steps: how many.
        between: called after each step, with its number.
        laid: places the model of the one with; the other one is on one device.
        **options: of both.
    """
    on_cpu = not {"dropout", "place"} & options.keys()
    plain = Training(None, **options, device="cpu" if on_cpu else "jax")
    rolled = Training("auto", **options | ({"place": laid} if laid else {}))
    want, got = plain.run(steps, between), rolled.run(steps, between)
    torch.testing.assert_close(got, want, rtol=2e-4, atol=1e-5)
    if laid is None and not on_cpu:
        assert len(rolled.step.replays) == len(plain.step.replays)
    return rolled
