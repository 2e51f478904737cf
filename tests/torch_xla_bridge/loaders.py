"""What the tests of loaders share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

import isoshard.torch_bridge as xs

WAIT = 20.0  # seconds until a thread that should do something has failed to


def grid_mesh() -> xs.Mesh:
    return xs.Mesh(range(8), (4, 2), ("data", "model"))


def part(mesh: xs.Mesh, spec: Any) -> xs.ShardingSpec:
    """A spec for this process's part of the batch."""
    return xs.ShardingSpec(mesh, spec, minibatch=True)


def until(done: Callable[[], Any]) -> None:
    """Wait for a condition that another thread brings about."""
    end = time.monotonic() + WAIT
    while not done():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def loader_threads() -> int:
    return sum("isoshard loader" in thread.name for thread in threading.enumerate())


def pair(mesh: xs.Mesh) -> xs.ShardingSpec:
    """Rows over all devices, for tensors of two axes."""
    return xs.ShardingSpec(mesh, (("data", "model"), None))


class Source:
    """A loader that can be iterated again, with a place to look in from outside."""

    def __init__(
        self,
        count: int,
        make: Callable[[int], Any] = lambda n: torch.full((8, 2), float(n)),
        before: Callable[[int], Any] = lambda _: None,
    ):
        self.count = count
        self.make = make
        self.before = before
        self.read = 0
        self.closed = 0

    def __iter__(self) -> Iterator[Any]:
        try:
            for number in range(self.count):
                self.before(number)
                self.read += 1
                yield self.make(number)
        finally:
            self.closed += 1

    def __len__(self) -> int:
        return self.count
