"""Moves that are noted: the same results as without, for every way an array may lie."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import isoshard as iso
from isoshard.core.errors import SpecError, UnevenError
from isoshard.core.runtime.caches import Bounded
from isoshard.core.transfer import reshard_cache

HOST = np.arange(32, dtype=np.float32).reshape(8, 4)


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    monkeypatch.setattr(reshard_cache, "_cache", Bounded(64, "test"))


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def typed(request):
    return iso.make_mesh((2, 4), ("x", "y"), axis_types=request.param)


def starts(mesh):
    twin = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Explicit, AxisType.Auto))
    layouts = [NamedSharding(m, spec) for m in (mesh, twin) for spec in (P(), P("y"), P("x", "y"))]
    return [SingleDeviceSharding(jax.devices()[3]), *layouts]


@pytest.mark.parametrize("spec", [P("y"), P("x", None)])
def test_the_second_time_is_as_the_first(typed, spec):
    for start in starts(typed):
        x = jax.device_put(HOST, start)
        first, again = iso.shard(x, typed, spec), iso.shard(x, typed, spec)
        assert first.sharding == again.sharding
        assert first.sharding.is_equivalent_to(NamedSharding(typed, spec), 2)
        assert first.sharding.mesh == typed
        assert (first is x) == (again is x) == (start == NamedSharding(typed, spec))
        np.testing.assert_array_equal(again, HOST)
    assert len(reshard_cache._cache) == len(starts(typed))


def test_faults_are_found_every_time(typed):
    x = iso.shard(HOST, typed, P())
    for _ in range(2):
        with pytest.raises(SpecError, match="no mesh axis is called 'z'"):
            iso.shard(x, typed, P("z"))
        with pytest.raises(UnevenError, match="w: shape"):
            iso.shard(x[:, :3], typed, P(None, "y"), name="w")
        with pytest.raises(TypeError, match="a mesh is a"):
            iso.shard(x, [1], P("y"))
    assert not reshard_cache._cache


@pytest.mark.parametrize("spec", [P(1, None), (1, None), "{replicated}", None])
def test_only_specs_of_names_are_noted(typed, spec):
    x = iso.shard(HOST, typed, P("x"))
    for _ in range(2):
        got = iso.shard(x, typed, spec)
        assert got.sharding.spec == (P() if spec in ("{replicated}", None) else P("y"))
    assert not reshard_cache._cache


def test_the_other_options_go_the_long_way(typed, counted):
    x = iso.shard(HOST, typed, P("x"))
    iso.shard(x, typed, P("y"))
    assert reshard_cache._cache
    with pytest.raises(iso.errors.CopyError, match="its data must move"):
        iso.shard(x, typed, P("y"), copy=False)
    own = iso.shard(x, typed, P("x"), copy=True)
    assert (
        own.addressable_data(0).unsafe_buffer_pointer()
        != x.addressable_data(0).unsafe_buffer_pointer()
    )
    with pytest.raises(iso.ShardingError, match=r"sizes .* are of blocks with padding"):
        iso.shard(x, typed, P("y"), sizes=(2, 2, 2, 2))


def test_memory_of_another_kind_is_another_place(typed):
    x = jax.device_put(HOST, NamedSharding(typed, P("x"), memory_kind="unpinned_host"))
    default = jax.devices()[0].default_memory().kind
    for _ in range(2):
        assert iso.shard(x, typed, P("x")).sharding.memory_kind == default
