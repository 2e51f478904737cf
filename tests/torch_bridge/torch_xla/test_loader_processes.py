"""Loaders in two processes, each of which gives its part of the batch."""

from __future__ import annotations

import subprocess
import sys

PROCESS = """
import sys
import jax, numpy as np, torch
rank, port = int(sys.argv[1]), sys.argv[2]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
import isoshard as iso, isoshard.torch_bridge as xs
from isoshard.torch_bridge.loading import MpDeviceLoader

whole = torch.arange(8 * 6).reshape(8, 6)
ids = np.arange(8)
# Devices 0..3 are of process 0, 4..7 of process 1.
for ids, shape, spec, mine in [
    (ids, (8, 1), ("data", None), whole[4 * rank : 4 * rank + 4]),
    (ids, (4, 2), ("data", None), whole[4 * rank : 4 * rank + 4]),
    (ids, (4, 2), ("data", "model"), whole[4 * rank : 4 * rank + 4]),
    (ids, (2, 4), (("data", "model"), None), whole[4 * rank : 4 * rank + 4]),
    (ids.reshape(2, 4).T.ravel(), (4, 2), ("data", None), whole),  # each row on both processes
    (ids.reshape(2, 4).T.ravel(), (4, 2), ("data", "model"), whole[:, 3 * rank : 3 * rank + 3]),
]:
    mesh = xs.Mesh(ids, shape, ("data", "model"))
    (got,) = MpDeviceLoader([mine], "jax", input_sharding=xs.ShardingSpec(mesh, spec, True))
    array = iso.to_jax(got)
    assert got.shape == (8, 6) == array.shape, (shape, spec, got.shape)
    assert len(array.addressable_shards) == 4
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(shard.data, whole[shard.index])
    (all_of_it,) = MpDeviceLoader([whole], "jax", input_sharding=xs.ShardingSpec(mesh, spec))
    for shard in iso.to_jax(all_of_it).addressable_shards:
        np.testing.assert_array_equal(shard.data, whole[shard.index])
print("right")
"""


def test_each_of_two_processes_gives_its_part():
    """Meshes whose rows lie in one process, in both, and across: the parts make the whole."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(rank), port],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            out, err = process.communicate(timeout=240)
            assert process.returncode == 0 and out == "right\n", err[-3000:]
    finally:
        for process in processes:
            process.kill()
