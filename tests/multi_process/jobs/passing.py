"""A rank that has nothing to agree on, and goes on, while the others wait for it."""

from __future__ import annotations

import itertools
import re
import time

import numpy as np
import pytest

import isoshard as iso
from isoshard import P
from isoshard.core.processes.agreement import assert_equal
from tests.multi_process.exchanging import device_mesh
from tests.multi_process.jobs.given import LIMIT, grid, host

AFTER = 1.8
"""Seconds after which it comes to its next exchange."""


def start():
    iso.distributed.init_distributed(timeout=60)


def left_behind(world, culprit, told, call):
    """The others are told in time what the culprit was given, and it at its next exchange."""
    began = time.monotonic()
    mesh = grid(*range(world.size))
    try:
        call()
    except iso.errors.DistributedError as error:
        assert world.rank != culprit, error
        took, text = time.monotonic() - began, str(error)
        assert took < LIMIT, f"{took:.2f} s: {text}"
    else:
        assert world.rank == culprit, "nobody noticed"
        time.sleep(AFTER)
        with pytest.raises(iso.errors.DistributedError) as told_later:
            iso.shard(host(2, 2), mesh, P())
        text = str(told_later.value)
    lines = [line for line in text.splitlines() if line.startswith("  rank")]
    named = [line for line in lines if line.startswith(f"  rank {culprit}: ")]
    assert len(lines) >= 2 and named and re.search(told, named[0]), text
    iso.shard(host(2, 2), mesh, P())  # life goes on


def each(world, cases):
    """Ranks 1 and 0 are left behind in turns."""
    for (name, (told, call)), culprit in zip(cases.items(), itertools.cycle((1, 0))):
        try:
            left_behind(world, culprit, told, lambda call=call, me=culprit: call(me))
        except BaseException as error:
            raise AssertionError(f"{name}, rank {culprit}: {error}") from error


def check_exchange(world):
    import torch
    from torch.distributed.tensor import DTensor, Shard, distribute_module

    mesh = device_mesh(world.size)

    def dtensor(*local):
        return DTensor.from_local(torch.ones(local), mesh, [Shard(0)], run_check=False)

    def module(rows):
        return torch.nn.Linear(4, rows, bias=False)

    modules = [(distribute_module(module(3 + me), mesh), module(3 + me)) for me in range(2)]

    def plain(me):
        x = torch.ones(4, 9 + me)
        iso.to_jax(x if world.rank == me else dtensor(4, 9 + me))

    def known(me):
        iso.to_jax(dtensor(3, 5) if world.rank == me else dtensor(3, 6 + me))

    def a_module(me):
        iso.to_jax(modules[me][world.rank == me])

    iso.to_jax(dtensor(3, 5))
    each(
        world,
        {
            "a plain tensor": (r"\(4, \d+\) of torch.float32, a tensor of its own", plain),
            "what is agreed": (r"\(\d+, 5\) of torch.float32 by \(Shard\(dim=0\),\)", known),
            "a plain module": (r"weight: \(\d, 4\) of .*, a tensor of its own", a_module),
        },
    )


def check_shard(world):
    def other_mesh(me):
        others = [rank for rank in range(world.size) if rank != me]
        mesh = grid(*others) if world.rank == me else grid(*range(world.size))
        iso.shard(host(12, 4), mesh, P("x"))

    each(world, {"a mesh without it": (r"mesh 'x' \(2\) of devices", other_mesh)})


def check_torch_function(world):
    import torch
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = device_mesh(world.size, names=("x",))
    power = iso.torch_function(lambda x, n: x**n, name="power")

    def x(*shape):
        return distribute_tensor(torch.ones(shape), mesh, [Shard(0)], src_data_rank=None)

    def plain(me):
        power(torch.ones(6, me + 1) if world.rank == me else x(6, me + 1), 2)

    def known(me):
        power(x(6, 5) if world.rank == me else x(6, 6 + me), 2)

    def compiled(me):
        power(x(6, 5), 2 if world.rank == me else 3 + me)

    power(x(6, 5), 2)
    each(
        world,
        {
            "a plain tensor": ("power: tensors of its own", plain),
            "what is agreed": (r"\(6, 5\) of (torch.)?float32 by", known),
            "what is compiled": (r"DTensors as before, \(6, 5\) of float32", compiled),
        },
    )


def check_restore(world):
    mesh = grid(*range(world.size))
    folder = world.scratch / "passed"
    iso.save(folder, {"w": host(12, 4)})

    def laid(me):
        like = iso.shard(np.zeros((12, 4), np.float32), mesh, P("x"))
        iso.restore(folder, {"w": host(12, 4) if world.rank == me else like})

    each(world, {"laid out": (r"w: \(12, 4\) float32 in host memory", laid)})


def check_who_is_slow_is_waited_for(world):
    """Ranks that come to other lines first, and late, have not passed."""
    mesh = grid(*range(world.size))
    if world.rank == 1:
        iso.shard(host(3, 1), grid(1), P("x"))
        iso.shard(host(3, 1), grid(0, 2), P())
        time.sleep(LIMIT)
    for rows in (world.size, 2 * world.size):
        iso.shard(host(rows, 4), mesh, P("x"))
    if world.rank != 1:
        iso.shard(host(3, 1), grid(0, 2), P())


def check_three_in_a_circle(world):
    """0 and 1 wait for each other's neighbour, and 2 for the first: none of two sees it."""
    first, second = [((0, 1), (0, 2)), ((1, 2), (0, 1)), ((0, 2), (1, 2))][world.rank]
    began = time.monotonic()
    with pytest.raises(iso.errors.DistributedError) as error:
        assert_equal("a", 1, first)
        assert_equal("a", 1, second)
    assert time.monotonic() - began < LIMIT
    lines = [line for line in str(error.value).splitlines() if line.startswith("  rank")]
    assert len(lines) == 3, str(error.value)
    for ranks in ((0, 1), (1, 2), (0, 2), (0, 1, 2)):
        if world.rank in ranks:
            assert_equal("b", 1, ranks)
