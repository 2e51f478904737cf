"""JAX's meshes where torch_xla's and DTensor's are taken: the mesh comes back as it was given."""

import jax
import numpy as np
import pytest
import torch
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard.core.layout.axis_types import auto
from isoshard.torch_bridge.distributed.device_mesh import device_mesh_of
from isoshard.torch_bridge.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from isoshard.torch_bridge.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from isoshard.torch_bridge.spmd.mesh import mesh_from

KINDS = {"explicit": (AxisType.Explicit,) * 2, "mixed": (AxisType.Explicit, AxisType.Auto)}
HOST = torch.arange(64.0).reshape(8, 8)


@pytest.fixture(params=KINDS)
def typed(request):
    """The mesh (2, 4) with Explicit axes, and with one; Auto are those of the other tests."""
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=KINDS[request.param])


def test_a_mark_is_on_the_mesh_given(typed, counted):
    t = HOST.to("jax")
    xs.mark_sharding(t, typed, ("x", "y"))
    before = counted("gathers")
    array = iso.to_jax(t)
    assert array.sharding == NamedSharding(typed, P("x", "y"))
    assert iso.sharding_of(t) == array.sharding
    marked = xs.mark_sharding_with_gradients(t * 2, typed, ("y", None))
    assert iso.to_jax(marked).sharding == NamedSharding(typed, P("y"))
    assert counted("gathers") == before
    np.testing.assert_array_equal(iso.to_jax(marked), HOST * 2)


def test_meshes_in_torchs_words_keep_jaxs_types(typed):
    for ours in (mesh_from(typed), device_mesh_of(typed), device_mesh_of(mesh_from(typed))):
        assert ours.get_jax_mesh() == typed
    assert device_mesh_of(typed) == device_mesh_of(auto(typed))
    own = xs.Mesh(range(8), (2, 4), ("x", "y"))
    assert own.get_jax_mesh().are_all_axes_auto
    assert str(mesh_from(typed).get_op_sharding((0, 1))) == str(own.get_op_sharding((0, 1)))


def test_dtensors(typed):
    mesh = device_mesh_of(typed)
    d = distribute_tensor(HOST, mesh, [Shard(0), Shard(1)])
    assert iso.to_jax(d).sharding == NamedSharding(typed, P("x", "y"))
    local = d.to_local()
    back = DTensor.from_local(local, mesh, [Shard(0), Shard(1)])
    assert iso.to_jax(back).sharding == NamedSharding(typed, P("x", "y"))
    np.testing.assert_array_equal(iso.to_jax(back), HOST)
    whole = back.redistribute(mesh, [Replicate(), Replicate()])
    assert iso.to_jax(whole).sharding.is_equivalent_to(NamedSharding(typed, P()), 2)


def test_manual_regions(typed):
    t = iso.shard(HOST, typed, P("x", "y"))
    piece = xs.enable_manual_sharding(t, ("x", "y"), mesh=typed)
    whole = xs.disable_manual_sharding(piece * 2, ("x", "y"), t.shape, mesh=typed)
    whole = getattr(whole, "global_tensor", whole)
    assert iso.to_jax(whole).sharding == NamedSharding(typed, P("x", "y"))
    np.testing.assert_array_equal(iso.to_jax(whole), HOST * 2)


def test_parallel_styles_and_their_gradients(typed):
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    x = torch.randn(4, 8)
    plain(x).square().sum().backward()
    wanted = [p.grad.clone() for p in plain.parameters()]
    plain.zero_grad()
    net = plain.to("jax")
    styles = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(net, device_mesh_of(typed)["y"], styles)
    net(iso.shard(x, typed, P("x"))).square().sum().backward()
    for name, p, gradient in zip("wbvc", net.parameters(), wanted, strict=True):
        spec = {"w": P("y"), "b": P("y"), "v": P(None, "y"), "c": P()}[name]
        for got in (p.detach(), p.grad):
            sharding = iso.to_jax(got).sharding
            assert sharding.mesh == typed
            assert sharding.is_equivalent_to(NamedSharding(typed, spec), got.dim())
        np.testing.assert_allclose(iso.to_jax(p.grad), gradient, rtol=1e-4, atol=1e-5)


def test_open_sums_are_no_torch_tensor():
    mesh = jax.make_mesh((2, 4), ("x", "y"))
    x = iso.reshard(iso.shard(HOST.numpy(), mesh, P()), P(unreduced={"y"}))
    with pytest.raises(
        iso.errors.UnrepresentableError, match=r"is unreduced over mesh axis 'y'.*Reduce them first"
    ):
        iso.to_torch(x)
    kept = iso.to_torch(iso.reshard(x, P(reduced={"y"})))
    assert iso.to_jax(kept).sharding == iso.sharding_of(kept) == NamedSharding(mesh, P())
    np.testing.assert_array_equal(iso.to_jax(kept), HOST)
