"""Programs that went wrong once, as found: far optimizers, swapped ones, stale numbers."""

from __future__ import annotations

from typing import Any

import torch

from tests.torch_bridge.engine.capture.changes.objects import Box
from tests.torch_bridge.engine.capture.changes.worlds import (
    World,
    linear,
    program,
    reads,
    state_of,
)

optim = torch.optim


def _one_weight(device: str) -> Any:
    model = torch.nn.Linear(4, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    return model.to(device)


@program("S1: optimizer three boxes away", "lr")
def three_boxes(device: str) -> World:
    return _boxes(device, 3)


@program("S1: optimizer five boxes away", "lr")
def five_boxes(device: str) -> World:
    return _boxes(device, 5)


@program("S1: optimizer nine boxes away", "lr")
def nine_boxes(device: str) -> World:
    return _boxes(device, 9)


def _boxes(device: str, depth: int) -> World:
    model = _one_weight(device)
    opt = optim.SGD(model.parameters(), lr=1.0)
    outer = Box(model=model, optimizer=opt)
    for _ in range(depth):
        outer = Box(inner=outer)

    def step(x: torch.Tensor) -> torch.Tensor:
        e = outer
        for _ in range(depth):
            e = e.inner
        e.model(x).sum().backward()
        e.optimizer.step()
        e.optimizer.zero_grad()
        return x

    def put(value: float) -> None:
        opt.param_groups[0]["lr"] = value

    return World(step, lambda: put(0.0), lambda: put(1.0), state=lambda: state_of(model))


@program("S1: trainer.strategy.engine", "lr")
def engine(device: str) -> World:
    model = _one_weight(device)
    opt = optim.SGD(model.parameters(), lr=1.0)

    class Loop:
        trainer = None

        def step(self, x: torch.Tensor) -> torch.Tensor:
            e: Any = self.trainer.strategy.engine
            e.model(x).sum().backward()
            e.optimizer.step()
            e.optimizer.zero_grad()
            return x

    loop: Any = Loop()
    loop.trainer = Box(strategy=Box(engine=Box(model=model, optimizer=opt)))

    def put(value: float) -> None:
        opt.param_groups[0]["lr"] = value

    return World(loop.step, lambda: put(0.0), lambda: put(1.0), state=lambda: state_of(model))


@program("S1: eval of a model nine boxes away", "training")
def far_model(device: str) -> World:
    model = torch.nn.Dropout(1.0)
    outer: Any = Box(model=model)
    for _ in range(9):
        outer = Box(inner=outer)

    def step(x: torch.Tensor) -> torch.Tensor:
        e = outer
        while hasattr(e, "inner"):
            e = e.inner
        return e.model(x) + 1

    return World(step, model.eval, model.train)


ALPHA = 3.0


@reads("S2: self.beta", "beta")
def own_beta(device: str) -> World:
    class Loss:
        beta = 1.0

        def step(self, x: torch.Tensor) -> torch.Tensor:
            return x.square() * self.beta

    loss = Loss()
    return World(loss.step, lambda: setattr(loss, "beta", 5.0), lambda: setattr(loss, "beta", 1.0))


@reads("S2: dropout.p", "p")
def dropout_p(device: str) -> World:
    dropout = torch.nn.Dropout(0.0)
    return World(
        lambda x: dropout(x), lambda: setattr(dropout, "p", 1.0), lambda: setattr(dropout, "p", 0.0)
    )


@reads("S2: trainer.temp", "temp")
def trainer_temp(device: str) -> World:
    trainer = Box(temp=1.0)
    return World(
        lambda x: torch.softmax(x / trainer.temp, -1),
        lambda: setattr(trainer, "temp", 0.5),
        lambda: setattr(trainer, "temp", 1.0),
    )


@reads("S2: a global alpha", "ALPHA")
def global_alpha(device: str) -> World:
    def put(value: float) -> None:
        globals()["ALPHA"] = value

    put(3.0)
    return World(lambda x: x * ALPHA, lambda: put(7.0), lambda: put(3.0))


@program("attack 5: trainer.o = SGD(lr=.5)", "o", "optimizer")
def another_optimizer(device: str) -> World:
    model = _one_weight(device)
    first, second = (optim.SGD(model.parameters(), lr=rate) for rate in (0.1, 0.5))
    trainer = Box(o=first)

    def step(x: torch.Tensor) -> torch.Tensor:
        trainer.o.zero_grad()
        loss = model(x).sum()
        loss.backward()
        trainer.o.step()
        return loss.detach()

    return World(
        step,
        lambda: setattr(trainer, "o", second),
        lambda: setattr(trainer, "o", first),
        state=lambda: state_of(model),
    )


@program("attack 5: an optimizer in a closure's variable", "optimizer")
def optimizer_in_cell(device: str) -> World:
    model = _one_weight(device)
    first, second = (optim.SGD(model.parameters(), lr=rate) for rate in (0.1, 0.5))
    optimizer = first

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def put(one: Any) -> None:
        nonlocal optimizer
        optimizer = one

    return World(step, lambda: put(second), lambda: put(first), state=lambda: state_of(model))


def _two(device: str) -> list[Any]:
    return [linear(1).to(device), linear(2).to(device)]


@program("attack 5: L.reverse() of two modules", "L", "modules")
def reversed_list(device: str) -> World:
    L = _two(device)
    return World(lambda x: torch.relu(L[1](L[0](x))), L.reverse, L.reverse)


@program("attack 5: self.m = b", "m")
def another_module(device: str) -> World:
    a, b = _two(device)

    class Holder:
        def __init__(self):
            self.m = a

        def step(self, x: torch.Tensor) -> torch.Tensor:
            return self.m(x)

    holder = Holder()
    return World(holder.step, lambda: setattr(holder, "m", b), lambda: setattr(holder, "m", a))


@program('attack 5: D["cur"] = "b"', "cur", "D")
def current_module(device: str) -> World:
    a, b = _two(device)
    D: dict[str, Any] = {"a": a, "b": b, "cur": "a"}
    return World(lambda x: D[D["cur"]](x), lambda: D.update(cur="b"), lambda: D.update(cur="a"))
