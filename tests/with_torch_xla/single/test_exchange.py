"""Without SPMD, on the CPU: one memory for both."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.errors import CopyError, DeviceError, ShardingError
from isoshard.core.transfer.device_put import shard
from isoshard.torch_xla_bridge import torch_xla_backend as backend


def address(array):
    return array.unsafe_buffer_pointer()


def pieces(array):
    return [address(piece.data) for piece in array.addressable_shards]


def from_jax(array, copy):
    return backend.from_jax(array, copy=copy)


def values(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_a_tensor_is_shared_with_jax(counted):
    tensor = values(30, 40).to("xla")
    array = backend.to_jax(tensor, copy=False)
    np.testing.assert_array_equal(array, values(30, 40))
    assert address(array) == address(backend.to_jax(tensor, copy=False))
    assert address(backend.to_jax(tensor)) == address(array)
    assert counted("copies") == 0
    own = backend.to_jax(tensor, copy=True)
    assert address(own) != address(array)
    assert counted("copies") == 1


def test_an_array_is_shared_with_torch_xla(counted):
    array = jnp.arange(12.0).reshape(3, 4)
    tensor = backend.from_jax(array, copy=False)
    assert tensor.device.type == "xla"
    assert address(backend.to_jax(tensor, copy=False)) == address(array)
    assert counted("copies") == 0
    own = backend.from_jax(array, copy=True)
    assert address(backend.to_jax(own)) != address(array)
    assert counted("copies") == 1
    np.testing.assert_array_equal(own.cpu().numpy(), array)


def test_one_memory_serves_all_devices_of_a_mesh(mesh):
    tensor = values(16, 16).to("xla")
    array = backend.to_jax(tensor, NamedSharding(mesh, P("x")), copy=False)
    start = address(backend.to_jax(tensor))
    assert sorted(set(pieces(array))) == [start, start + tensor.nbytes // 2]
    with pytest.raises(CopyError, match="is not contiguous"):
        backend.to_jax(tensor, NamedSharding(mesh, P(None, "x")), copy=False)
    columns = backend.to_jax(tensor, NamedSharding(mesh, P(None, "x")))
    np.testing.assert_array_equal(columns, values(16, 16))


def test_an_array_whole_on_many_devices_is_shared(mesh):
    array = shard(values(8, 8).numpy(), mesh, P())
    tensor = backend.from_jax(array, copy=False)
    assert address(backend.to_jax(tensor)) in pieces(array)


def test_an_array_in_pieces_is_copied(mesh):
    array = shard(values(8, 8).numpy(), mesh, P("x"))
    with pytest.raises(CopyError, match=r"its pieces are on 8 devices\. Pass copy=None"):
        backend.from_jax(array, copy=False)
    np.testing.assert_array_equal(backend.from_jax(array).cpu().numpy(), array)


def test_an_array_on_another_device_is_shared():
    array = jax.device_put(jnp.arange(8.0), jax.devices()[3])
    tensor = backend.from_jax(array, copy=False)
    assert address(backend.to_jax(tensor)) == address(array)


# torch_xla ends the process when a tensor without data is shared, and its sync() gives data to
# some of these only.
UNFINISHED = {
    "zeros": lambda: torch.zeros(3, 4, device="xla"),
    "a scalar": lambda: torch.full((), 2.0, device="xla"),
    "no elements": lambda: torch.zeros(0, 4, device="xla"),
    "random": lambda: torch.randn(4, 4, device="xla"),
    "a row": lambda: values(4, 6).to("xla")[1],
    "transposed": lambda: values(4, 6).to("xla").t(),
    "expanded": lambda: values(4, 1).to("xla").expand(4, 6),
    "a product": lambda: values(4, 4).to("xla") @ values(4, 4).to("xla"),
    "compared": lambda: values(4, 4).to("xla") > 0,
    "conjugate": lambda: torch.complex(values(4), values(4)).to("xla").conj(),
    "written to": lambda: values(4, 4).to("xla").add_(1).fill_diagonal_(0),
    "a parameter": lambda: torch.nn.Linear(3, 4).to("xla").weight,
}


@pytest.mark.parametrize("make", UNFINISHED.values(), ids=UNFINISHED)
def test_what_has_no_data_yet_is_executed_first(make):
    tensor = make()
    array = backend.to_jax(tensor, copy=False)
    np.testing.assert_array_equal(array, tensor.detach().cpu().resolve_conj().numpy())


def test_a_long_computation_is_waited_for():
    for _ in range(5):
        tensor = values(900, 900).to("xla")
        for _ in range(10):
            tensor = tensor @ tensor / 900
        array = np.array(backend.to_jax(tensor))
        np.testing.assert_array_equal(array, tensor.cpu().numpy())


def test_a_step_still_running_is_waited_for():
    layer = torch.nn.Linear(500, 500).to("xla")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    inputs = values(500, 500).to("xla")
    for _ in range(5):
        layer(inputs).square().mean().backward()
        optimizer.step()
        torch_xla.sync()
        array = np.array(backend.to_jax(layer.weight, copy=False))
        np.testing.assert_array_equal(array, layer.weight.detach().cpu().numpy())


def test_a_long_computation_of_jax_is_waited_for():
    step = jax.jit(lambda x: x @ x / 900)
    array = jnp.asarray(values(900, 900).numpy())
    for _ in range(10):
        array = step(array)
    tensor = backend.from_jax(array, copy=False)
    np.testing.assert_array_equal((tensor * 1).cpu().numpy(), array)


def test_training_leaves_what_was_shared_as_it_was():
    layer = torch.nn.Linear(64, 64).to("xla")
    array = backend.to_jax(layer.weight, copy=False)
    before = np.array(array)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        layer(values(4, 64).to("xla")).square().sum().backward()
        optimizer.step()
        torch_xla.sync()
    xm.wait_device_ops()
    np.testing.assert_array_equal(array, before)
    assert not np.array_equal(backend.to_jax(layer.weight), before)


def test_operations_in_place_leave_an_array_of_jax_as_it_was():
    array = jnp.arange(64.0)
    tensor = backend.from_jax(array, copy=False)
    for _ in range(3):
        tensor.add_(1)
        torch_xla.sync()
    xm.wait_device_ops()
    np.testing.assert_array_equal(array, np.arange(64.0))
    np.testing.assert_array_equal(tensor.cpu().numpy(), np.arange(64.0) + 3)


def test_memory_lives_as_long_as_its_last_user():
    tensor = backend.from_jax(jnp.arange(1e6), copy=False)
    array = backend.to_jax(values(1000, 1000).to("xla"), copy=False)
    gc.collect()
    [torch.full((1000, 1000), 7.0).to("xla") + i for i in range(5)]
    torch_xla.sync()
    np.testing.assert_array_equal(tensor.cpu().numpy(), np.arange(1e6, dtype=np.float32))
    np.testing.assert_array_equal(array, values(1000, 1000))


INTEGERS = ("bool", "uint8", "int8", "int16", "uint16", "uint32", "int32")
FLOATS = ("float16", "bfloat16", "float32", "complex64")


@pytest.mark.parametrize("name", (*INTEGERS, *FLOATS))
def test_dtypes_are_kept(name):
    array = jnp.arange(6).astype(name)
    tensor = backend.from_jax(array, copy=False)
    assert tensor.dtype == getattr(torch, name)
    back = backend.to_jax(tensor, copy=False)
    assert (back.dtype, address(back)) == (array.dtype, address(array))


def test_float8_is_copied():
    array = jnp.arange(6, dtype="float8_e5m2")
    with pytest.raises(CopyError, match="DLPack has no float8_e5m2"):
        backend.from_jax(array, copy=False)
    tensor = backend.from_jax(array)
    assert tensor.dtype == torch.float8_e5m2
    with pytest.raises(CopyError, match=r"DLPack has no torch.float8_e5m2"):
        backend.to_jax(tensor, copy=False)
    np.testing.assert_array_equal(backend.to_jax(tensor), array)


def test_away_from_the_cpu_everything_is_copied(monkeypatch, counted):
    tensor, array = values(3, 4).to("xla"), jnp.arange(4.0)
    monkeypatch.setattr("torch_xla.runtime.device_type", lambda: "TPU")
    for refused in (lambda: backend.to_jax(tensor, copy=False), lambda: from_jax(array, False)):
        with pytest.raises(CopyError, match="torch_xla runs on TPU, and its DLPack takes only"):
            refused()
    np.testing.assert_array_equal(backend.to_jax(tensor), values(3, 4))
    np.testing.assert_array_equal(from_jax(array, None).cpu().numpy(), array)
    assert counted("copies") == 2


def test_wide_integers_are_narrowed_only_by_a_copy():
    tensor = torch.arange(5).to("xla")
    with pytest.raises(CopyError, match="int64 is stored as int32"):
        backend.to_jax(tensor, copy=False)
    np.testing.assert_array_equal(backend.to_jax(tensor), np.arange(5))
    with pytest.raises(CopyError, match="do not fit"):
        backend.to_jax(tensor + 2**40)


def test_wide_types_are_shared_with_x64(x64):
    for dtype in (torch.int64, torch.float64):
        tensor = torch.arange(5, dtype=dtype).to("xla")
        array = backend.to_jax(tensor, copy=False)
        assert str(array.dtype) == str(dtype).removeprefix("torch.")
        assert address(backend.to_jax(backend.from_jax(array, copy=False))) == address(array)


def test_wide_floats_are_refused_without_it():
    with pytest.raises(CopyError, match="float64 would lose precision"):
        backend.to_jax(torch.ones(3, dtype=torch.float64).to("xla"))


def test_what_is_no_array_with_data_is_refused():
    with pytest.raises(TypeError, match=r"takes a jax\.Array that has data"):
        backend.from_jax(np.ones(3))
    with pytest.raises(TypeError, match=r"takes a jax\.Array that has data"):
        jax.jit(backend.from_jax)(jnp.ones(3))
    with pytest.raises(TypeError, match="int4"):
        backend.from_jax(jnp.ones(3, "int4"))


def test_a_graph_for_gradients_is_not_cut_unseen():
    weight = torch.nn.Linear(3, 3).to("xla").weight
    with pytest.raises(CopyError, match=r"JAX would not see the graph; pass tensor.detach\(\)"):
        backend.to_jax(weight * 2)


def test_a_tensor_lies_whole_on_its_device():
    found = backend.sharding_of(torch.ones(3).to("xla"))
    assert found.mesh.devices.tolist() == jax.devices()[:1]
    assert found.spec == P()


def test_marks_wait_for_spmd(mesh):
    with pytest.raises(ShardingError, match=r"call torch_xla.runtime.use_spmd\(\) at the start"):
        backend.mark(torch.ones(8).to("xla"), mesh, P("x"))


def test_a_mesh_needs_as_many_devices_in_torch_xla(mesh):
    with pytest.raises(DeviceError, match="CPU_NUM_DEVICES=8"):
        backend.mesh_to_torch_xla(mesh)
