"""What a started run looks like; the job's argument says how it was started."""

import os
import sys
import time
from pathlib import Path

import isoshard as iso

LAUNCHERS = {"jax": "jax.distributed", "torch": "torch.distributed", "": "torchrun"}


def _how():
    return sys.argv[3] if len(sys.argv) > 3 else ""


def start():
    how = _how()
    devices = 1
    if how == "jax":
        import jax

        jax.distributed.initialize(
            f"127.0.0.1:{os.environ['TEST_PORT']}",
            int(os.environ["TEST_SIZE"]),
            int(os.environ["TEST_RANK"]),
        )
    elif how == "torch":
        import torch.distributed as dist

        dist.init_process_group("gloo")
    elif how == "two-devices":
        devices = 2
    found = iso.distributed.init_distributed(timeout=60, local_devices=devices)
    assert iso.distributed.init_distributed() is found  # a second call does nothing
    assert found.launcher == LAUNCHERS.get(how, os.environ.get("TEST_LAUNCHER", "torchrun")), found


def check_both_runtimes_have_the_same_ranks(world):
    import jax
    import torch.distributed as dist

    import isoshard.core.processes.start as processes

    assert jax.process_count() == dist.get_world_size() == world.size
    assert jax.process_index() == dist.get_rank() == world.rank
    assert jax.local_device_count() == 1 + (_how() == "two-devices")
    assert jax.device_count() == world.size * jax.local_device_count()
    found = processes.init_distributed()
    assert (found.rank, found.size, found.local_rank) == (world.rank, world.size, _local(world))


def _local(world):
    names = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")
    return next((int(os.environ[name]) for name in names if name in os.environ), 0)


def check_both_compute(world):
    import jax
    import jax.numpy as jnp
    import numpy as np
    import torch
    import torch.distributed as dist
    from jax.sharding import PartitionSpec as P

    ours = torch.full((2,), float(world.rank + 1))
    dist.all_reduce(ours)
    want = world.size * (world.size + 1) / 2
    assert ours.tolist() == [want, want]
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(world.size, -1), ("x", "y"))
    mine = [
        jax.device_put(np.full(1, world.rank + 1, np.float32), device)
        for device in jax.local_devices()
    ]
    whole = jax.make_array_from_single_device_arrays(
        (world.size,), jax.NamedSharding(mesh, P("x")), mine
    )
    total = jax.jit(jnp.sum, out_shardings=jax.NamedSharding(mesh, P()))(whole)
    assert float(total.addressable_data(0)) == want


def check_a_sigterm_is_left_to_the_script(world):
    import signal

    status = Path("/proc/self/status").read_text()
    caught = int(next(x for x in status.splitlines() if x.startswith("SigCgt")).split()[1], 16)
    assert bool(caught >> (signal.SIGTERM - 1) & 1) == (_how() == "jax")


def check_the_end_comes_in_any_order(world):
    time.sleep(0.4 * (world.size - 1 - world.rank if _how() else world.rank))
    print(f"rank {world.rank} is done")
    (world.scratch / f"done-{world.rank}").write_text(repr(time.time()))
