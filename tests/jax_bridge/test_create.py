"""Models created sharded: what each device holds, at most, while they are made."""

import math

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import isoshard as iso
from isoshard.core.layout.leaf_paths import named_leaves
from isoshard.core.runtime import metrics
from isoshard.jax_bridge import create

PLAN = iso.Plan({"*kernel": P("data", "model"), "*bias": P("model")})
WIDTH, LAYERS = 128, 6


class Tower(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(LAYERS)])


def make_nnx():
    return nnx.split(Tower(nnx.Rngs(0)))[1]


@pytest.fixture(scope="module")
def mesh():
    return iso.make_mesh((2, 4), ("data", "model"))


def _live_bytes_by_device(but):
    held = dict.fromkeys(jax.devices(), 0)
    for array in jax.live_arrays():
        if id(array) not in but:
            shard = math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
            for device in array.devices():
                held[device] += shard
    return held


def test_a_device_never_holds_much_more_than_its_shards(mesh, monkeypatch, counted):
    make = make_nnx
    monkeypatch.setattr(create, "_SMALL", 1 << 10)
    largest_live = 0
    compute = create._compute
    before = {id(array) for array in jax.live_arrays()}

    def watched(*args):
        nonlocal largest_live
        result = compute(*args)
        largest_live = max(largest_live, *_live_bytes_by_device(before).values())
        return result

    monkeypatch.setattr(create, "_compute", watched)
    made = iso.create_sharded(make, mesh, PLAN)
    shards = sum(array.addressable_shards[0].data.nbytes for array in jax.tree.leaves(made))
    whole = max(array.nbytes for array in jax.tree.leaves(made))
    assert shards == LAYERS * (WIDTH * WIDTH // 8 + WIDTH // 4) * 4
    # The buffers that are alive after each program, and what XLA needs for temporaries besides.
    assert largest_live <= 1.01 * shards
    assert shards <= counted("peak_bytes") < 1.3 * shards
    programs = [c for c in metrics.compilations() if c.what.startswith("creation")]
    assert 6 <= len(programs) <= 26
    # Of one parameter, no device holds all: not even with the temporaries of the random bits.
    extra = counted("peak_bytes") - shards
    assert extra < whole
    values = dict(named_leaves(made))
    for name, want in named_leaves(jax.jit(make)()):
        np.testing.assert_allclose(values[name], want, rtol=1e-6, atol=1e-7, err_msg=name)


def test_the_watch_sees_a_whole_parameter(mesh):
    before = {id(array) for array in jax.live_arrays()}
    made = make_nnx()
    held = _live_bytes_by_device(before)
    assert max(held.values()) >= sum(array.nbytes for array in jax.tree.leaves(made))


def test_an_initialiser_that_xla_cannot_partition_shows(mesh, counted):
    def make():
        return {"kernel": nnx.initializers.orthogonal()(jax.random.key(0), (256, 256), "float32")}

    made = iso.create_sharded(make, mesh, PLAN)
    assert made["kernel"].sharding == NamedSharding(mesh, P("data", "model"))
    assert counted("peak_bytes") > made["kernel"].nbytes


def test_it_is_traced_once(mesh):
    traced = []

    def make(key):
        traced.append(1)
        return {"kernel": jax.random.normal(key, (8, 8))}

    iso.create_sharded(make, mesh, PLAN, jax.random.key(0))
    assert len(traced) == 1


def test_nothing_to_create(mesh):
    assert iso.create_sharded(dict, mesh, PLAN) == {}
