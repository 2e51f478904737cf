import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.errors import CopyError, DeviceError, UnevenError
from isoshard.core.layout.mesh import make_mesh
from isoshard.core.transfer import exchange
from isoshard.core.transfer.device_put import shard

SPECS = [P(), P("x"), P(None, "y"), P("y", "x"), P(("x", "y")), P(None, ("y", "x"))]


def values(*shape, dtype=np.float32):
    return np.random.default_rng(0).normal(size=shape).astype(dtype)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_shards_arrive_in_jax_where_torch_xla_has_them(backend, mesh, spec):
    host = values(8, 16)
    tensor = backend.mark(torch.from_numpy(host).to("xla"), mesh, spec)
    array = backend.to_jax(tensor)
    assert array.sharding == NamedSharding(mesh, spec)
    np.testing.assert_array_equal(array, host)
    theirs = {s.shard_device: s.data.numpy() for s in xs.XLAShardedTensor(tensor).local_shards}
    assert len(array.addressable_shards) == len(theirs) == 8
    for piece in array.addressable_shards:
        number = jax.devices().index(piece.device)
        np.testing.assert_array_equal(piece.data, theirs[f"CPU:{number}"])


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_arrays_arrive_in_torch_xla_where_jax_has_them(backend, mesh, spec):
    host = values(8, 16)
    tensor = backend.from_jax(shard(host, mesh, spec))
    assert backend.sharding_of(tensor) == NamedSharding(mesh, spec)
    np.testing.assert_array_equal(tensor.cpu().numpy(), host)
    np.testing.assert_array_equal(backend.to_jax(tensor * 2), host * 2)


def test_devices_in_another_order(backend):
    order = [3, 1, 0, 2, 7, 6, 5, 4]
    mesh = make_mesh((2, 4), ("x", "y"), devices=[jax.devices()[i] for i in order])
    host = values(8, 8)
    array = backend.to_jax(backend.from_jax(shard(host, mesh, P("y", "x"))))
    assert array.sharding == NamedSharding(mesh, P("y", "x"))
    np.testing.assert_array_equal(array, host)


def test_a_result_that_was_not_executed_yet(backend, mesh):
    host = values(64, 64)
    tensor = backend.mark(torch.from_numpy(host).to("xla"), mesh, P("x", "y"))
    array = backend.to_jax(torch.relu(tensor) - 1)
    np.testing.assert_array_equal(array, np.maximum(host, 0) - 1)


def test_data_nobody_annotated_is_whole_on_every_device(backend):
    array = backend.to_jax(torch.from_numpy(values(4, 4)).to("xla"))
    assert array.sharding.is_fully_replicated
    assert len(array.devices()) == 8
    np.testing.assert_array_equal(array, values(4, 4))


def test_another_layout_can_be_asked_for(backend, mesh):
    tensor = backend.mark(torch.from_numpy(values(8, 8)).to("xla"), mesh, P("x"))
    array = backend.to_jax(tensor, NamedSharding(mesh, P(None, "y")))
    assert array.sharding.spec == P(None, "y")
    np.testing.assert_array_equal(array, values(8, 8))


def test_an_array_of_one_device_is_whole(backend, mesh):
    tensor = backend.from_jax(jnp.asarray(values(4, 4)))
    assert backend.sharding_of(tensor, mesh) == NamedSharding(mesh, P())
    np.testing.assert_array_equal(tensor.cpu().numpy(), values(4, 4))


@pytest.mark.parametrize("name", ["bool", "uint8", "int8", "int32", "float16", "bfloat16"])
def test_dtypes_are_kept(backend, mesh, name):
    host = np.arange(64).reshape(8, 8) % 5
    array = shard(jnp.asarray(host, name), mesh, P("x", "y"))
    tensor = backend.from_jax(array)
    assert tensor.dtype == getattr(torch, name)
    back = backend.to_jax(tensor)
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)


def test_float8_travels_as_it_is(backend, mesh):
    array = shard(jnp.arange(64, dtype="float8_e4m3fn").reshape(8, 8), mesh, P("x"))
    tensor = backend.from_jax(array)
    assert tensor.dtype == torch.float8_e4m3fn
    np.testing.assert_array_equal(backend.to_jax(tensor), array)


def test_wide_integers_must_fit(backend, mesh):
    small = backend.mark(torch.arange(8).to("xla"), mesh, P("x"))
    assert backend.to_jax(small).dtype == np.int32
    large = backend.mark((torch.arange(8) + 2**40).to("xla"), mesh, P("x"))
    with pytest.raises(CopyError, match="do not fit"):
        backend.to_jax(large)


def test_wide_floats_need_x64(backend, mesh, x64):
    host = values(8, 8, dtype=np.float64)
    tensor = backend.mark(torch.from_numpy(host).to("xla"), mesh, P("x"))
    np.testing.assert_array_equal(backend.to_jax(tensor), host)


def test_nothing_can_be_shared_and_copies_are_counted(backend, mesh, counted):
    tensor = backend.mark(torch.from_numpy(values(8, 8)).to("xla"), mesh, P("x"))
    with pytest.raises(CopyError, match="under SPMD torch_xla does not export its shards"):
        backend.to_jax(tensor, copy=False)
    array = shard(values(8, 8), mesh, P("x"))
    with pytest.raises(CopyError, match="under SPMD torch_xla does not import shards"):
        backend.from_jax(array, copy=False)
    before = counted("copied_bytes")
    backend.to_jax(tensor)
    assert counted("copied_bytes") - before >= 8 * values(8, 8).nbytes // 2
    before = counted("copied_bytes")
    backend.from_jax(array)
    assert counted("copied_bytes") - before == values(8, 8).nbytes


def test_shards_that_torch_xla_padded_are_refused(backend, mesh):
    tensor = torch.from_numpy(values(7, 3)).to("xla")
    xs.mark_sharding(tensor, backend.mesh_to_torch_xla(mesh), (0, 1))
    with pytest.raises(UnevenError, match=r"weight: shape .* no multiple of its 2 shards"):
        backend.to_jax(tensor, name="weight")


def test_a_mesh_of_fewer_devices_is_refused(backend):
    array = shard(values(8, 8), make_mesh((2,), ("x",)), P("x"))
    with pytest.raises(DeviceError, match="takes all of its 8 devices"):
        backend.from_jax(array)


def test_a_graph_for_gradients_is_not_cut_unseen(backend, mesh):
    weight = torch.nn.Parameter(torch.from_numpy(values(8, 8)).to("xla"))
    with pytest.raises(CopyError, match=r"pass tensor.detach\(\)"):
        backend.to_jax(weight * 2)
    np.testing.assert_array_equal(backend.to_jax(weight), values(8, 8))


def test_training_goes_on_in_jax(backend, mesh):
    """Parameters of torch_xla, trained a step there, are inputs of a jitted function here."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 4)
    inputs = torch.from_numpy(values(16, 8))
    layer.to("xla")
    backend.mark(layer.weight, mesh, P("y", "x"))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(inputs.to("xla")).square().mean().backward()
    optimizer.step()
    torch_xla.sync()
    weight, bias = exchange.to_jax([layer.weight, layer.bias])
    assert weight.sharding == NamedSharding(mesh, P("y", "x"))
    found = jax.jit(lambda w, b, x: x @ w.T + b)(weight, bias, inputs.numpy())
    wanted = layer(inputs.to("xla")).detach().cpu()
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
