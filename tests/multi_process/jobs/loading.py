"""`iso.data.loader` over the devices of several processes."""

from __future__ import annotations

import sys

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import isoshard as iso
from tests.multi_process.bitwise import assert_holds, raising


def start():
    iso.distributed.init_distributed(local_devices=int(sys.argv[3]))


def rows(number, count=8):
    return np.arange(count * 4, dtype=np.float32).reshape(count, 4) + 100 * number


def check_everyone_gives_all(world):
    mesh = iso.make_mesh((2, 2), ("x", "y"))
    found = list(iso.data.loader([rows(n) for n in range(3)], mesh, P("x", "y")))
    for number, batch in enumerate(found):
        assert_holds(batch, rows(number))


def check_everyone_gives_its_part(world):
    mesh = iso.make_mesh((4,), ("x",))
    part = 8 // world.size
    mine = slice(world.rank * part, (world.rank + 1) * part)
    source = [{"x": rows(n)[mine]} for n in range(3)]
    for spec in (P("x"), iso.Plan({"x": P("x")})):
        found = list(iso.data.loader(source, mesh, spec, local=True))
        assert [batch["x"].shape for batch in found] == [(8, 4)] * 3
        for number, batch in enumerate(found):
            assert_holds(batch["x"], rows(number))


def check_short_parts_are_padded(world):
    mesh = iso.make_mesh((4,), ("x",))
    part = 8 // world.size
    mine = [rows(0)[:part], rows(1)[: part - world.rank % 2]]
    source = [{"x": batch} for batch in mine]
    found = list(iso.data.loader(source, mesh, P("x"), local=True, last="pad", mask="real"))
    assert found[1]["x"].shape == (8, 4)
    total = jax.jit(
        lambda real: real.sum(), out_shardings=iso.shard(np.int32(0), mesh, None).sharding
    )
    assert int(total(found[1]["real"])) == 8 - world.size // 2


def check_another_number_of_batches(world):
    mesh = iso.make_mesh((4,), ("x",))
    part = 8 // world.size
    source = [rows(0)[:part]] * (2 + world.rank % 2)
    loader = iso.data.loader(source, mesh, P("x"), local=True)
    with raising(iso.errors.DistributedError, "the number of batches"):
        list(loader)


def check_another_number_of_rows(world):
    mesh = iso.make_mesh((4,), ("x",))
    part = 8 // world.size * (1 + world.rank % 2)
    loader = iso.data.loader([np.ones((part, 3), np.float32)], mesh, P("x"), local=True)
    with raising(iso.errors.DistributedError, "the arrays of a batch"):
        list(loader)
