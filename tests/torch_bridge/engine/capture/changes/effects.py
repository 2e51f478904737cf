"""What the step itself changes or uses up: counters, caches, clocks, streams, files."""

from __future__ import annotations

import itertools
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from isoshard.core.runtime.private_names import release
from tests.torch_bridge.engine.capture.changes.objects import Box
from tests.torch_bridge.engine.capture.changes.worlds import BY_DYNAMO, World, both, reads

BY_NEWER = BY_DYNAMO if release(torch.__version__) >= (2, 15) else ""


def _nothing() -> None:
    pass


@reads("a counter that the step increments", "steps", once=True)
def counter(device: str) -> World:
    holder = Box(steps=0)

    def read(x: torch.Tensor) -> torch.Tensor:
        holder.steps += 1
        return x * holder.steps

    return World(
        read, *both(lambda v: setattr(holder, "steps", v), 0, 10), state=lambda: vars(holder)
    )


@reads("a counter that the step increments and nothing reads", "calls", once=True)
def unread_counter(device: str) -> World:
    holder = Box(calls=0)

    def read(x: torch.Tensor) -> torch.Tensor:
        holder.calls += 1
        return x * 2

    return World(
        read, *both(lambda v: setattr(holder, "calls", v), 0, 10), state=lambda: vars(holder)
    )


@reads("a counter in a closure", "count", once=True)
def closure_counter(device: str) -> World:
    count = 0

    def read(x: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return x * count

    return World(read, _nothing, _nothing, state=lambda: {"count": count})


COUNT = 0


@reads("a global counter", "COUNT", once=True)
def global_counter(device: str) -> World:
    def read(x: torch.Tensor) -> torch.Tensor:
        global COUNT
        COUNT += 1
        return x * COUNT

    globals()["COUNT"] = 0
    return World(read, _nothing, _nothing, state=lambda: {"COUNT": COUNT})


@reads("a running mean in a Python float", "average", once=True)
def running_mean(device: str) -> World:
    holder = Box(average=1.0)

    def read(x: torch.Tensor) -> torch.Tensor:
        holder.average = 0.9 * holder.average + 0.1 * 3.0
        return x * holder.average

    return World(
        read, *both(lambda v: setattr(holder, "average", v), 1.0, 7.0), state=lambda: vars(holder)
    )


@reads("a list that the step appends numbers to", "history", once=True)
def appended_numbers(device: str) -> World:
    history: list[float] = []

    def read(x: torch.Tensor) -> torch.Tensor:
        history.append(float(len(history)))
        return x * sum(history)

    return World(read, history.clear, history.clear, state=lambda: {"history": list(history)})


@reads(
    "a list that the step appends its result to", "history", "outlive", "lambda", "mul", once=True
)
def appended_tensors(device: str) -> World:
    history: list[torch.Tensor] = []

    def read(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        history.append(y)
        return y + len(history)

    return World(
        read,
        history.clear,
        history.clear,
        state=lambda: {"length": len(history)},
    )


@reads("a dict that the step fills as a cache", "cache", once=True)
def filled_cache(device: str) -> World:
    cache: dict[str, float] = {}
    holder = Box(warmth=2.0)

    def read(x: torch.Tensor) -> torch.Tensor:
        if "factor" not in cache:
            cache["factor"] = holder.warmth
        return x * cache["factor"]

    def put(value: float) -> None:
        holder.warmth = value
        cache.clear()

    return World(read, *both(put, 2.0, 5.0), state=lambda: dict(cache))


@reads("a flag that the first call flips", "ready", once=True)
def first_call(device: str) -> World:
    holder = Box(ready=False)

    def read(x: torch.Tensor) -> torch.Tensor:
        if not holder.ready:
            holder.ready = True
            return -x
        return x * 2

    return World(
        read, *both(lambda v: setattr(holder, "ready", v), True, False), state=lambda: vars(holder)
    )


@reads("a flag that every call flips", "odd", once=True)
def flipped(device: str) -> World:
    holder = Box(odd=False)

    def read(x: torch.Tensor) -> torch.Tensor:
        holder.odd = not holder.odd
        return x if holder.odd else -x

    return World(read, _nothing, _nothing, state=lambda: vars(holder))


@reads("a tensor that the step replaces", "hidden", "outlive", once=True)
def hidden_state(device: str) -> World:
    holder = Box(hidden=torch.zeros(4, 4, device=device))

    def read(x: torch.Tensor) -> torch.Tensor:
        holder.hidden = torch.tanh(holder.hidden.detach() + x.detach())
        return x * holder.hidden

    return World(
        read,
        lambda: setattr(holder, "hidden", torch.ones(4, 4, device=device)),
        _nothing,
        state=lambda: vars(holder),
    )


@reads("a tensor that the step writes to in place", "hidden", "outside", once=True)
def hidden_in_place(device: str) -> World:
    holder = Box(hidden=torch.zeros(4, 4, device=device))

    def read(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            holder.hidden.add_(x.detach())
        return x * holder.hidden.clone()

    return World(
        read,
        lambda: holder.hidden.fill_(3.0),
        _nothing,
        state=lambda: vars(holder),
    )


@reads("an attribute that the step sets for the caller", "seen", once=True)
def set_for_caller(device: str) -> World:
    holder = Box(warmth=2.0, seen=0.0)

    def read(x: torch.Tensor) -> torch.Tensor:
        holder.seen = holder.warmth + 1
        return x * holder.warmth

    return World(
        read,
        *both(lambda v: setattr(holder, "warmth", v), 2.0, 5.0),
        state=lambda: {"seen": holder.seen},
    )


# --- Clocks, streams and files -------------------------------------------------------------------


@reads("the clock", "perf_counter", "time", against="pattern", once=True)
def clock(device: str) -> World:
    start = time.perf_counter()
    return World(lambda x: x + (time.perf_counter() - start) * 1e3, _nothing, _nothing)


@reads("time.time", "time", against="pattern", once=True)
def wall_clock(device: str) -> World:
    start = time.time()
    return World(lambda x: x + (time.time() - start) * 1e3, _nothing, _nothing)


@reads("random.random", "random", once=True)
def python_random(device: str) -> World:
    random.seed(3)
    return World(lambda x: x * random.random(), lambda: random.seed(5), _nothing)


@reads("a random.Random of the step", "random", "rng", frozen=BY_DYNAMO, once=True)
def own_random(device: str) -> World:
    rng = random.Random(3)
    return World(lambda x: x * rng.uniform(1, 2), lambda: rng.seed(5), _nothing)


@reads("np.random", "random", once=True)
def numpy_random(device: str) -> World:
    np.random.seed(3)  # noqa: NPY002
    return World(
        lambda x: x * np.random.rand(),  # noqa: NPY002
        lambda: np.random.seed(5),  # noqa: NPY002
        _nothing,
    )


@reads("a numpy generator", "random", "rng", "Generator", once=True)
def numpy_generator(device: str) -> World:
    rng = np.random.default_rng(3)
    return World(lambda x: x * float(rng.uniform(1, 2)), _nothing, _nothing)


@reads("the next of an iterator", "batches", "next", "iterator", once=True)
def iterator(device: str) -> World:
    batches = iter([2.0, 3.0, 4.0, 5.0, 6.0, 7.0, *range(8, 40)])
    return World(lambda x: x * next(batches), _nothing, _nothing)


@reads("itertools.count", "numbers", "next", "count", once=True)
def counting(device: str) -> World:
    numbers = itertools.count(1)
    return World(lambda x: x * next(numbers), _nothing, _nothing)


@reads("the next of a generator", "stream", "generator", "next", frozen=BY_NEWER, once=True)
def generator(device: str) -> World:
    def numbers():
        value = 1.0
        while True:
            value += 1
            yield value

    stream = numbers()
    return World(lambda x: x * next(stream), _nothing, _nothing)


@reads("a generator that is sent to", "stream", "generator", "send", once=True)
def sent(device: str) -> World:
    def numbers():
        total = 0.0
        while True:
            total += yield total

    stream: Any = numbers()
    next(stream)
    return World(lambda x: x * stream.send(2.0), _nothing, _nothing)


@reads("a file", "open", "file", "scale.txt", "read_text")
def file(device: str) -> World:
    path = Path(tempfile.mkdtemp()) / "scale.txt"

    def put(value: float) -> None:
        path.write_text(str(value))

    put(2.0)
    return World(lambda x: x * float(path.read_text()), *both(put, 2.0, 5.0))


@reads("an environment variable", "environ", "ISOSHARD_TEST_SCALE")
def environment(device: str) -> World:
    def put(value: float) -> None:
        os.environ["ISOSHARD_TEST_SCALE"] = str(value)

    return World(lambda x: x * float(os.environ["ISOSHARD_TEST_SCALE"]), *both(put, 2.0, 5.0))


@reads(
    "an environment variable by getenv",
    "environ",
    "getenv",
    "ISOSHARD_TEST_SCALE",
    frozen=BY_DYNAMO,
)
def environment_getenv(device: str) -> World:
    def put(value: float) -> None:
        os.environ["ISOSHARD_TEST_SCALE"] = str(value)

    return World(lambda x: x * float(os.getenv("ISOSHARD_TEST_SCALE", "1")), *both(put, 2.0, 5.0))


@reads("the directory", "getcwd", "directory")
def directory(device: str) -> World:
    start = Path.cwd()
    other = Path(tempfile.mkdtemp())

    def read(x: torch.Tensor) -> torch.Tensor:
        return x if Path(os.getcwd()) == start else -x  # noqa: PTH109

    return World(read, lambda: os.chdir(other), lambda: os.chdir(start))
