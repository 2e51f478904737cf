"""A safetensors folder over several processes: each reads the bytes of its own devices."""

import sys

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import isoshard as iso
from isoshard import weights
from isoshard.core.processes import assert_equal
from isoshard.core.runtime import metrics

SHAPE = (64, 16384)
KERNEL = weights.WeightMap(
    [weights.Rule("{p*}.weight", "{p*}.kernel", weights.Kernel()), weights.Rule("ids", "ids")]
)


def start():
    iso.distributed.init_distributed(local_devices=int(sys.argv[3]))


def _weights():
    rng = np.random.default_rng(0)
    made = {f"{i}.weight": rng.normal(size=SHAPE).astype(np.float32) for i in range(3)}
    return {**made, "ids": np.arange(8, dtype=np.int32)}


def _folder(world):
    folder = world.scratch / "model"
    if world.rank == 0 and not folder.exists():
        iso.save_safetensors(folder, _weights(), max_shard_size=6_000_000)
    assert_equal("the files are there", "yes")
    return folder


def _check(loaded, expected):
    for name, x in loaded.items():
        assert x.shape == expected[name].shape
        for shard in x.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), expected[name][shard.index])


def check_each_process_reads_its_own(world):
    """Rows, and columns that are far more than a page: not a byte too many."""
    folder, expected = _folder(world), _weights()
    mesh = iso.make_mesh((jax.device_count(),), ("x",))
    for spec in (("x", None), (None, "x")):
        metrics.reset()
        loaded = iso.load_safetensors(folder, mesh, {**dict.fromkeys(expected, spec), "ids": None})
        _check(loaded, expected)
        own = 3 * expected["0.weight"].nbytes // world.size + expected["ids"].nbytes
        assert metrics.counters()["file_bytes_read"] == own, metrics.counters()


def check_rules_on_the_way(world):
    folder = _folder(world)
    expected = KERNEL.apply(_weights())
    mesh = iso.make_mesh((jax.device_count(),), ("x",))
    plan = iso.Plan({"*.kernel": ("x", None)}, default=P())
    loaded = iso.load_safetensors(folder, mesh, plan, weights=KERNEL)
    _check(loaded, expected)
    back = KERNEL.inverse(loaded)
    assert back["0.weight"].sharding.spec == P(None, "x")
    _check(back, _weights())


def check_saving_what_others_hold_is_refused(world):
    mesh = iso.make_mesh((jax.device_count(),), ("x",))
    loaded = iso.load_safetensors(_folder(world), mesh, ("x",))
    try:
        iso.save_safetensors(world.scratch / "out", loaded)
    except weights.WeightError as error:
        assert "this process does not have the weights (4 errors)" in str(error), error
    else:
        raise AssertionError("it was saved")
    whole = iso.full(loaded)
    folder = world.scratch / f"out-{world.rank}"
    iso.save_safetensors(folder, whole)
    _check(iso.load_safetensors(folder, mesh, None), _weights())
