"""One rank fails, in the way that the job's argument says, while the others hang in collectives."""

import os
import signal
import subprocess
import sys
import time

import isoshard as iso

HEARTBEAT = 3
PATIENCE = 4
FROZEN = 16


def start():
    iso.distributed.init_distributed(timeout=60, heartbeat=HEARTBEAT, patience=PATIENCE)


def check_fault(world):
    import jax
    import torch
    import torch.distributed as dist

    kind, culprit = sys.argv[3], int(sys.argv[4])
    wait_in_jax = _sum_over_all(world)  # compiled, and run once
    dist.barrier()
    if world.rank != culprit:
        if world.rank % 2:
            dist.all_reduce(torch.ones(4))
        else:
            jax.block_until_ready(wait_in_jax())
        return
    time.sleep(1.0)
    (world.scratch / "fault").write_text(repr(time.time()))
    if kind == "raise":
        raise ValueError("boom")
    if kind == "exit":
        os._exit(3)
    if kind == "leave":
        return
    if kind == "launcher":
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(60)
    if kind == "stop":  # nobody else ends a process that is stopped
        subprocess.Popen(["sh", "-c", f"sleep {FROZEN}; kill -KILL {os.getpid()}"])
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[kind])


def _sum_over_all(world):
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import PartitionSpec as P

    mesh = jax.sharding.Mesh(np.array(jax.devices()), "x")
    mine = jax.device_put(np.ones(1, np.float32), jax.local_devices()[0])
    sharding = jax.NamedSharding(mesh, P("x"))
    whole = jax.make_array_from_single_device_arrays((world.size,), sharding, [mine])
    total = jax.jit(jnp.sum, out_shardings=jax.NamedSharding(mesh, P()))
    jax.block_until_ready(total(whole))
    return lambda: total(whole)
