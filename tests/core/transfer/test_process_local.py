"""`from_local` where one process has every device; several are in tests/multi_process."""

import itertools

import jax
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec as P

import isoshard as iso
from isoshard.core.layout.spec import named_sharding
from isoshard.core.transfer import process_local
from isoshard.core.transfer.host_memory import HostSlice, aligned_empty, slices_to_jax

SPECS = [P(), P("y"), P("x", "y"), P(None, ("x", "y"))]


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


def counting(*shape):
    host = aligned_empty(shape, np.float32)
    host[...] = np.arange(host.size).reshape(shape)
    return host


class TestArrays:
    @pytest.mark.parametrize("spec", SPECS, ids=str)
    def test_all_devices_hold_all(self, mesh, spec):
        host = counting(8, 16)
        for given in (host, iso.to_jax(host), torch.from_numpy(host)):
            array = iso.to_jax(iso.from_local(given, mesh, spec))
            assert array.sharding == iso.shard(host, mesh, spec).sharding
            np.testing.assert_array_equal(array, host)

    def test_memory_is_shared_or_copied(self, mesh, counted):
        host = counting(64, 16)
        array = iso.from_local(host, mesh, P(("x", "y")), copy=False)
        for piece in array.addressable_shards:
            assert piece.data.unsafe_buffer_pointer() == host[piece.index].ctypes.data
        assert counted("copies") == 0
        array = iso.from_local(host, mesh, P(("x", "y")), copy=True)
        assert counted("copied_bytes") == host.nbytes
        copies = counted("copies")
        iso.from_local(host, mesh, P(), copy=True)
        assert counted("copies") == copies + 1  # which the replicas share
        host[:] = 0
        np.testing.assert_array_equal(array, counting(64, 16))

    def test_no_dimension_and_no_element(self, mesh):
        assert iso.from_local(np.float32(3), mesh, None).item() == 3
        assert iso.from_local(ones(0, 8), mesh, P("x", "y")).shape == (0, 8)

    def test_tensors_keep_what_they_are(self, mesh):
        weight = torch.nn.Parameter(torch.ones(8, 4, dtype=torch.bfloat16))
        placed = iso.from_local(weight, mesh, P("x"), name="w")
        assert isinstance(placed, torch.nn.Parameter)
        assert (placed.dtype, placed.requires_grad) == (torch.bfloat16, True)
        assert iso.sharding_of(placed).spec == P("x")


class TestTrees:
    def test_one_spec_a_tree_of_them_or_a_plan(self, mesh):
        tree = {"a": ones(8, 4), "b": [ones(16)]}
        for spec in (P("x"), {"a": P("x"), "b": P("x")}):
            placed = iso.from_local(tree, mesh, spec)
            assert jax.tree.leaves(jax.tree.map(lambda a: a.sharding.spec, placed)) == [P("x")] * 2
        plan = iso.Plan({"a": P(None, "y"), "b.*": None})
        placed = iso.from_local(tree, mesh, plan, shape={"a": (8, 4), "b": [(16,)]})
        assert placed["a"].sharding.spec == P(None, "y")

    def test_all_faults_at_once(self, mesh, monkeypatch):
        monkeypatch.setattr(process_local, "slices_to_jax", None)
        with pytest.raises(
            iso.ShardingError, match=r"(?s)3 leaves.*in\.a: local shape.*in\.b.*'z'.*in\.c: int64"
        ):
            tree = {"a": ones(3), "b": ones(4), "c": np.full(8, 1 << 40)}
            iso.from_local(tree, mesh, {"a": P("x"), "b": P("z"), "c": P("x")}, name="in")

    def test_shapes_must_be_of_the_tree(self, mesh):
        tree = {"a": ones(8, 4), "b": ones(16)}
        for shape in ({"a": (8, 4)}, (8, 4), {"a": 3, "b": (16,)}, {"a": (8, 4), "c": (16,)}):
            with pytest.raises(iso.ShardingError, match=r"is not the global shape of each of a, b"):
                iso.from_local(tree, mesh, P("x"), shape=shape)

    def test_modules_and_structs_are_refused(self, mesh):
        with pytest.raises(TypeError, match="not modules: m"):
            iso.from_local({"m": torch.nn.Linear(2, 2)}, mesh, P())
        with pytest.raises(TypeError, match=r"takes data, and s is a jax\.ShapeDtypeStruct.*shard"):
            iso.from_local({"s": jax.ShapeDtypeStruct((8,), "float32")}, mesh, P())


class TestRefusals:
    def test_a_shape_that_is_not_this_part(self, mesh):
        with pytest.raises(
            iso.ShardingError,
            match=r"w: local shape \(4, 4\).*has shape \(8, 4\), which is \[0:8, 0:4",
        ):
            iso.from_local(ones(4, 4), mesh, P("x"), shape=(8, 4), name="w")

    def test_an_axis_that_does_not_divide(self, mesh):
        with pytest.raises(
            iso.errors.UnevenError, match=r"axis 0 has local size 6.*4 blocks.*size: 8 in"
        ):
            iso.from_local(ones(6, 4), mesh, P("y"))
        with pytest.raises(iso.errors.UnevenError, match=r"shape \(6, 4\) does not split evenly"):
            iso.from_local(ones(6, 4), mesh, P("y"), shape=(6, 4))

    def test_a_traced_value(self, mesh):
        with pytest.raises(iso.ShardingError, match=r"w: a traced value.*outside jit"):
            jax.jit(lambda a: iso.from_local(a, mesh, P("x"), name="w"))(ones(8))

    def test_memory_that_cannot_be_shared(self, mesh):
        with pytest.raises(iso.errors.CopyError, match="not contiguous"):
            iso.from_local(ones(8, 16), mesh, P(None, "x"), copy=False)
        with pytest.raises(iso.errors.CopyError, match="its data must move"):
            iso.from_local(iso.to_jax(ones(8)), mesh, P("x"), copy=False)


def test_cuts_of_a_part(mesh):
    """A host that has every second block: what two processes would give, put together here."""
    host = counting(8, 16)
    sharding = named_sharding(P("y", None), mesh, 2)
    part = np.concatenate([host[0:2], host[4:6]])
    cuts = []
    for number, device in enumerate(mesh.devices.flat):
        block = number % 4 // 2 * 2
        index = (slice(block, block + 2), slice(0, 16))
        cuts.append(HostSlice(device, number, (number % 4 * 2, 0), index))
    array = slices_to_jax(part, sharding, (8, 16), tuple(cuts), copy=None, name="part")
    want = np.concatenate([host[0:2], host[0:2], host[4:6], host[4:6]])
    np.testing.assert_array_equal(array, want)
    for a, b in itertools.pairwise(array.addressable_shards):
        assert a.data.shape == b.data.shape == (2, 16)
