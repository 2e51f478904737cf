"""Rank 1 has another mesh, or another shape, than rank 0; nobody catches what comes of it."""

import sys
import time

import isoshard as iso


def start():
    iso.distributed.init_distributed(timeout=60)


def check_exchange(world):
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    other = world.rank == 1
    mesh = DeviceMesh("cpu", [1, 0] if other and sys.argv[3] == "mesh" else [0, 1])
    local = torch.ones(4, 3 if other and sys.argv[3] == "shape" else 2)
    tensor = DTensor.from_local(local, mesh, [Shard(0)])
    (world.scratch / "fault").write_text(repr(time.time()))
    iso.to_jax(tensor)
    raise AssertionError("the ranks should not have agreed")
