"""Sums still to be taken, and layouts said on another mesh of the same devices."""

import itertools
import math

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from torch.distributed.tensor import Partial, Replicate, Shard

import isoshard as iso
from isoshard import make_mesh
from isoshard.errors import UnrepresentableError
from isoshard.torch_bridge.placements.translation import layout_of, placements_of, placements_on
from tests.torch_bridge.dtensor.layouts import MESHES, all_placements, torch_mesh


def test_partial_is_an_unreduced_axis_and_jax_takes_the_sum():
    mesh = torch_mesh((2, 4), names=("dp", "tp"))
    layout = layout_of((Shard(0), Partial()), mesh, (4, 3))
    sharding = layout.sharding
    assert sharding.spec == P("dp", unreduced={"tp"})
    assert set(sharding.mesh.axis_types) == {AxisType.Explicit}
    assert placements_of(sharding) == (Shard(0), Partial("sum"))
    assert layout_of((Shard(0), Replicate()), mesh, (4, 3)).sharding.mesh.are_all_axes_auto
    local = np.random.default_rng(0).normal(size=(8, 2, 3)).astype(np.float32)
    array = jax.make_array_from_single_device_arrays(
        layout.shape,
        sharding,
        [jax.device_put(x, d) for x, d in zip(local, sharding.mesh.devices.flat, strict=True)],
    )
    total = jax.sharding.reshard(array, NamedSharding(sharding.mesh, P("dp")))
    np.testing.assert_allclose(total, local.reshape(2, 4, 2, 3).sum(1).reshape(4, 3), rtol=1e-5)


def test_several_partial_axes_uneven_and_of_one_device():
    mesh = torch_mesh((2, 1, 4))
    layout = layout_of((Partial(), Partial(), Shard(0)), mesh, (5,))
    assert layout.sharding.spec == P("c", unreduced={"a", "b"})
    assert layout.sizes == ((2, 2, 1, 0),) and layout.padded == (8,)
    assert placements_of(layout.sharding) == (Partial(), Partial(), Shard(0))


@pytest.mark.parametrize("kind", ["avg", "min", "max", "product", "band", "bor", "bxor"])
def test_partials_that_jax_has_not_are_refused(kind):
    mesh = torch_mesh((2, 4), names=("dp", "tp"))
    if hasattr(getattr(jax.sharding, "UnreducedKind", None), kind):
        mixed = (Partial(kind), Partial("sum"))
        with pytest.raises(UnrepresentableError, match=r"axes dp, tp .*by one operation"):
            layout_of(mixed, mesh, (8,))
        return
    with pytest.raises(UnrepresentableError, match=rf"mesh axis 'tp'.*{kind}.*unreduced axes"):
        layout_of((Shard(0), Partial(kind)), mesh, (8,))


@pytest.mark.skipif(not hasattr(jax.sharding, "UnreducedKind"), reason="JAX 0.12 brought maxima")
@pytest.mark.parametrize("kind", ["max", "min"])
def test_maxima_and_minima_are_unreduced_axes(kind):
    mesh = torch_mesh((2, 4), names=("dp", "tp"))
    layout = layout_of((Shard(0), Partial(kind)), mesh, (4, 3))
    assert placements_of(layout.sharding) == (Shard(0), Partial(kind))
    local = np.random.default_rng(0).normal(size=(8, 2, 3)).astype(np.float32)
    devices = layout.sharding.mesh.devices.flat
    array = jax.make_array_from_single_device_arrays(
        layout.shape,
        layout.sharding,
        [jax.device_put(x, d) for x, d in zip(local, devices, strict=True)],
    )
    whole = getattr(local.reshape(2, 4, 2, 3), kind)(1).reshape(4, 3)
    np.testing.assert_array_equal(iso.full(array), whole)
    assert placements_of(iso.reshard(array, P("dp")).sharding) == (Shard(0), Replicate())
    np.testing.assert_array_equal(iso.reshard(array, P(None, None)), whole)


class MaskedPartial(Partial):
    """As torch's own for embeddings: a sum, and more to do after it."""


def test_a_kind_of_partial_is_no_plain_sum():
    assert MaskedPartial().reduce_op == "sum"
    with pytest.raises(UnrepresentableError, match=r"mesh axis 'a'.*unreduced axes"):
        layout_of((MaskedPartial(),), torch_mesh((4,)), (8,))


def test_reduced_axes_are_replicated():
    explicit = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"), (AxisType.Explicit,) * 2)
    assert placements_of(NamedSharding(explicit, P("x", reduced={"y"}))) == (Shard(0), Replicate())


def test_placements_on_every_other_mesh_of_eight():
    said = 0
    eights = [shape for shape in MESHES if math.prod(shape) == 8]
    for here, there in itertools.product(eights, repeat=2):
        if 1 in here and 1 in there:
            continue  # they say no more than those without such axes
        ranks = np.arange(8).reshape(there[::-1]).transpose().ravel().tolist()  # column by column
        other = torch_mesh(there, ranks=ranks)
        for placements in all_placements(here, 1):
            sharding = layout_of(placements, torch_mesh(here), (8,)).sharding
            try:
                found = placements_on(sharding, other, 1)
            except UnrepresentableError:
                assert not any(
                    same_map(layout_of(p, other, (8,)).sharding, sharding)
                    for p in all_placements(there, 1)
                )
                continue
            said += 1
            assert same_map(layout_of(found, other, (8,)).sharding, sharding)
    assert said > 60


def same_map(a, b):
    return a.devices_indices_map((8,)) == b.devices_indices_map((8,))


def test_partial_on_another_mesh():
    mesh = torch_mesh((2, 2, 2))
    sharding = layout_of((Partial(), Shard(0), Partial()), mesh, (8,)).sharding
    turned = torch_mesh((2, 4), ranks=[0, 1, 4, 5, 2, 3, 6, 7])
    assert placements_on(sharding, turned, 1) == (Shard(0), Partial())
    assert placements_on(sharding, mesh, 1) == (Partial(), Shard(0), Partial())
    shuffled = torch_mesh((2, 4), ranks=[1, 5, 0, 4, 2, 6, 3, 7])  # the order of a sum is free
    assert placements_on(sharding, shuffled, 1) == (Shard(0), Partial())
    whole = layout_of((Partial(), Replicate(), Replicate()), mesh, (8,)).sharding
    assert placements_on(whole, torch_mesh((2, 4)), 1) == (Partial(), Replicate())
    with pytest.raises(UnrepresentableError, match="sums over groups of devices that are no axes"):
        placements_on(whole, torch_mesh((8,)), 1)


def test_placements_on_other_devices():
    rows = NamedSharding(make_mesh((4,), ("x",)), P("x"))
    with pytest.raises(UnrepresentableError, match=r"\[0, 1, 2, 3\].*\[4, 5, 6, 7\].*move nothing"):
        placements_on(rows, torch_mesh((4,), rank=4, ranks=[4, 5, 6, 7]), 1)
    back = torch_mesh((4,), ranks=[0, 3, 1, 2])
    with pytest.raises(UnrepresentableError, match="follow no order of the mesh axes"):
        placements_on(rows, back, 1)
