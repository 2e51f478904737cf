"""Several threads and asyncio tasks at once: each computes what it computes alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jax.sharding import NamedSharding

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P, make_mesh
from isoshard.torch_bridge.engine.recording import regions
from isoshard.torch_bridge.engine.recording.immediate import Immediate, immediately
from isoshard.torch_bridge.engine.recording.recipes import RECIPES, Recipe
from isoshard.torch_bridge.engine.recording.recorder import recorder
from isoshard.torch_bridge.engine.values import sharding_ids
from isoshard.torch_bridge.engine.values.value import Aval
from isoshard.torch_bridge.execution.closures import _HANDLER, add_step_closure

WAIT = 240.0


def at_once(*tasks: Callable[[], Any]) -> list[Any]:
    """The results of functions that run in threads of their own, which begin together."""
    results: list[Any] = [None] * len(tasks)
    barrier = threading.Barrier(len(tasks))

    def run(number: int) -> None:
        barrier.wait(WAIT)
        try:
            results[number] = tasks[number]()
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(tasks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
        assert not thread.is_alive()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


class Trainer:
    """A small model with its optimizer and data."""

    def __init__(self, seed: int):
        rng = np.random.default_rng(seed)

        def draw(*shape: int) -> torch.Tensor:
            return torch.from_numpy(rng.standard_normal(shape).astype(np.float32)).to("jax")

        self.model = torch.nn.Sequential(
            torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2)
        ).to("jax")
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(draw(*parameter.shape))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.x, self.y = draw(3, 4), draw(3, 2)

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(self.model(self.x), self.y)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def state(self) -> list[bytes]:
        return [p.detach().cpu().numpy().tobytes() for p in self.model.parameters()]


def lazily(seed: int, steps: int, every: int) -> Any:
    """Trains, and executes some steps in one program."""
    trainer = Trainer(seed)
    losses = []
    for number in range(steps):
        losses.append(trainer.step())
        if number % every == every - 1:
            xs.sync()
    return [loss.item() for loss in losses], trainer.state()


def captured(seed: int, steps: int, every: int = 1000) -> Any:
    """Trains with a compiled step, and captures it anew now and then."""
    trainer = Trainer(seed)
    losses = []
    for number in range(steps):
        if number % every == 0:
            step = xs.compile(trainer.step)
        losses.append(step())
    return [loss.item() for loss in losses], trainer.state()


def evaluated(seed: int, steps: int) -> Any:
    """Uses a model, and reads what it gives."""
    trainer = Trainer(seed)
    results = []
    with torch.no_grad():
        for number in range(steps):
            results.append(trainer.model(trainer.x + number).sum().item())
    return results, trainer.state()


def counted(seed: int, steps: int) -> Any:
    """Writes to memory in place, through views too, and brings a tensor for each step."""
    count = torch.zeros(4, device="jax")
    for number in range(steps):
        count += torch.full((4,), float(seed + number)).to("jax")
        count[number % 4].mul_(2)
        count.fmod_(1000)
        if number % 2 == 0:
            count.tolist()
    return count.tolist()


def saved(folder: Path, seed: int, steps: int) -> Any:
    """Trains, and saves checkpoints meanwhile."""
    trainer = Trainer(seed)
    for number in range(steps):
        trainer.step()
        if number % 2 == 0:
            iso.save(folder / f"{seed}-{threading.get_ident()}-{number}", trainer.model)
    return trainer.state()


def test_six_threads_compute_what_each_computes_alone(tmp_path):
    steps = 2
    tasks: list[Callable[[], Any]] = [
        lambda: lazily(1, steps, 1),
        lambda: lazily(2, steps, 2),
        lambda: captured(3, steps, 2),
        lambda: evaluated(5, steps),
        lambda: counted(6, steps),
        lambda: saved(tmp_path, 8, steps),
    ]
    alone = [task() for task in tasks]
    together = at_once(*tasks)
    assert together == alone


def test_threads_record_on_tensors_they_share():
    shared = [torch.tensor([float(n)]).to("jax") for n in range(6)]
    barrier, made = threading.Barrier(4), {}

    def use(order: list[int]) -> list[float]:
        for _ in range(15):
            found = [one.item() for one in [shared[n] * (n + 1) for n in order]]
        mine = made[order[0]] = shared[order[1]] * 2
        barrier.wait(WAIT)
        for other in (0, 5, 3, 1):  # each tape needs those of the others
            mine = mine + made[other]
        return [*found, mine.item()]

    orders = [[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [3, 0, 5, 2, 4, 1], [1, 1, 4, 4, 2, 2]]
    found = at_once(*(lambda order=order: use(order) for order in orders))
    total = sum(2.0 * order[1] for order in orders)
    assert found == [
        [*(float(n * (n + 1)) for n in order), 2.0 * order[1] + total] for order in orders
    ]


def test_a_tape_is_executed_by_one_thread_while_another_records_on_it():
    handed: list[torch.Tensor] = []
    seen: list[float] = []

    def record() -> float:
        total = torch.zeros(1, device="jax")
        for _ in range(120):
            total = total + 1
            handed.append(total)
        handed.append(None)  # pyright: ignore[reportArgumentType]
        return total.item()

    def read() -> bool:
        done = False
        while not done:
            while handed:
                tensor = handed.pop()
                done = done or tensor is None
                if tensor is not None and len(seen) < 30:
                    seen.append(tensor.item())
        return True

    total, _ = at_once(record, read)
    assert total == 120.0
    assert seen and all(1 <= one <= 120 for one in seen)


def test_memory_is_not_donated_while_another_thread_has_an_operation_waiting():
    weight = torch.ones(4).to("jax")
    xs.sync()
    recorded, go_on = threading.Event(), threading.Event()

    def wait() -> list[float]:
        waiting = weight * 3
        recorded.set()
        assert go_on.wait(WAIT)
        return waiting.tolist()

    def write() -> list[float]:
        assert recorded.wait(WAIT)
        weight.add_(1)
        xs.sync()
        go_on.set()
        return weight.tolist()

    assert at_once(wait, write) == [[3.0] * 4, [2.0] * 4]


def test_what_several_threads_make_at_once_is_one_or_numbered_apart():
    names = [(f"a{n}", f"b{n}") for n in range(40)]
    shapes = [(n, 7, 3) for n in range(300, 360)]

    def make() -> tuple[list[int], list[Aval], list[Recipe]]:
        shardings = [NamedSharding(make_mesh((2, 4), pair), P(pair[0])) for pair in names]
        layouts = [sharding_ids.intern(sharding) for sharding in shardings]
        avals = [Aval.contiguous(shape, torch.float32) for shape in shapes]
        return layouts, avals, [Recipe("nothing", lambda *_: [], 0) for _ in range(500)]

    (layouts, avals, _), *others = made = at_once(*[make] * 4)
    specs = [sharding_ids.sharding(number).spec for number in layouts]  # pyright: ignore
    assert specs == [P(pair[0]) for pair in names]
    for same_layouts, same_avals, _ in others:
        assert same_layouts == layouts
        assert all(a is b for a, b in zip(avals, same_avals, strict=True))
    assert all(RECIPES[one.id] is one for *_, recipes in made for one in recipes)


def test_a_background_closure_reads_while_a_step_is_captured():
    value = torch.arange(3.0).to("jax")
    weight = torch.ones(2).to("jax")
    seen: list[Any] = []
    inside, go_on = threading.Event(), threading.Event()

    def step() -> torch.Tensor:
        weight.add_(1)
        inside.set()
        assert go_on.wait(WAIT)
        return weight.sum()

    def read(tensor: torch.Tensor) -> None:
        assert inside.wait(WAIT)
        try:
            seen.append((tensor * 2).tolist())
            seen.append(tensor.sum().item())
        finally:
            go_on.set()

    add_step_closure(read, args=(value,), run_async=True)
    xs.sync()
    assert xs.compile(step)().item() == 4.0
    _HANDLER.wait()
    assert seen == [[0.0, 2.0, 4.0], 3.0]


def test_a_task_does_not_see_what_another_one_opened():
    x = torch.ones(2).to("jax")

    async def opens(inside: asyncio.Event, done: asyncio.Event) -> list[bool]:
        with immediately(), regions.inside(regions.Region("mine", full_graph=True)):
            child = asyncio.create_task(uses(inside))
            inside.set()
            await child
            await done.wait()
            return [isinstance(recorder(), Immediate), regions.name() == "mine"]

    async def uses(inside: asyncio.Event) -> list[float]:
        await inside.wait()
        assert not isinstance(recorder(), Immediate)
        assert regions.name() is None
        return (x + 1).tolist()

    async def main() -> Any:
        inside, done = asyncio.Event(), asyncio.Event()
        opening = asyncio.create_task(opens(inside, done))
        seen = await uses(inside)
        done.set()
        return seen, await opening

    assert asyncio.run(main()) == ([2.0, 2.0], [True, True])


def test_tasks_are_captured_in_a_step_and_record_beside_one():
    weight, other = torch.ones(2).to("jax"), torch.ones(2).to("jax")

    async def add(number: float) -> None:
        await asyncio.sleep(0)
        weight.add_(number)

    async def both() -> None:
        await asyncio.gather(add(1.0), add(2.0))

    step = xs.compile(lambda: asyncio.run(both()) or weight.sum())
    assert [step().item() for _ in range(3)] == [8.0, 14.0, 20.0]
    assert len(step.replays) == 1
    double = xs.compile(lambda: weight.mul_(2).sum())

    async def captures() -> list[float]:
        found = []
        for _ in range(4):
            found.append(double().item())
            await asyncio.sleep(0)
        return found

    async def records() -> list[float]:
        nonlocal other
        for _ in range(4):
            other = other + 1
            await asyncio.sleep(0)
        return other.tolist()

    async def main() -> Any:
        return await asyncio.gather(captures(), records())

    assert asyncio.run(main()) == [[40.0, 80.0, 160.0, 320.0], [5.0, 5.0]]
