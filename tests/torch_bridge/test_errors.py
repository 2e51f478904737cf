"""Bad input: each mistake has a clear error, and nothing has changed after it."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P, ShardingError
from isoshard.errors import DeviceError, SpecError, UnevenError


@pytest.fixture
def grid() -> xs.Mesh:
    """The mesh of torch_xla's users."""
    return xs.Mesh(range(8), (2, 4), ("x", "y"))


BAD_SPECS = {
    "wrong_name": ((8, 4), ("z", None), SpecError, r"no mesh axis is called 'z'.*'x' \(2\)"),
    "index_out_of_range": ((8, 4), (0, 2), SpecError, r"no mesh axis 2"),
    "axis_twice": ((8, 4), ("x", "x"), SpecError, r"mesh axis 'x' is used 2 times"),
    "too_many_entries": ((8, 4), ("x", None, "y"), SpecError, r"3 entries for a tensor of rank 2"),
    "too_few_entries": ((8, 4), ("x",), SpecError, r"1 entries for a tensor of rank 2"),
    "not_an_axis": ((8, 4), (0.5, None), SpecError, r"0.5 is no axis name, index"),
    "bare_name": ((8, 4), "x", SpecError, r"'x' is no OpSharding string"),
    "uneven": ((6, 4), ("y", None), UnevenError, r"axis 0 has size 6.*4 shards.*Pad it to 8"),
    "uneven_both": ((7, 3), ("x", "y"), UnevenError, r"axis 0 has size 7.*axis 1 has size 3"),
}


def test_a_bad_spec_is_refused_and_the_tensor_is_as_before(grid):
    for case, (shape, spec, error, message) in BAD_SPECS.items():
        if "uneven" in case:
            continue
        data = torch.arange(float(np.prod(shape))).reshape(shape)
        t = data.to("jax")
        with pytest.raises(error, match=message):
            xs.mark_sharding(t, grid, spec)
        assert t.sharding_spec == "" and t.partition_spec is None
        with pytest.raises(error, match=message):
            xs.mark_sharding(t * 1, grid, spec)  # recorded, not computed yet
        assert torch.equal((t + 1).cpu(), data + 1) and torch.equal(t.cpu(), data)


@pytest.mark.parametrize("case", [c for c in BAD_SPECS if c != "too_few_entries"])
def test_shard_of_a_module_refuses_a_bad_spec_and_leaves_the_module(case, grid):
    shape, spec, error, message = BAD_SPECS[case]
    model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(*reversed(shape), bias=False))
    before = dict(model.named_parameters())
    values = {name: tensor.detach().clone() for name, tensor in before.items()}
    with pytest.raises(error, match=message) as caught:
        iso.shard(model, grid, {"1.weight": spec})
    assert "1.weight" in str(caught.value)
    for name, tensor in model.named_parameters():
        assert tensor is before[name] and tensor.device.type == "cpu"
        assert torch.equal(tensor, values[name])
    model(torch.ones(2, shape[1])).sum().backward()


def test_all_faults_of_a_module_are_reported_at_once(grid):
    model = torch.nn.Sequential(torch.nn.Linear(6, 3), torch.nn.Linear(3, 8))
    specs = {"0.weight": ("x", "x"), "0.bias": ("y",), "1.weight": ("z", None), "1.bias": ("x",)}
    with pytest.raises(ShardingError, match=r"3 leaves.*nothing was changed") as caught:
        iso.shard(model, grid, specs)
    for name in ("0.weight", "0.bias", "1.weight"):
        assert name in str(caught.value)
    assert "1.bias" not in str(caught.value)
    assert all(p.device.type == "cpu" for p in model.parameters())


def test_marking_again_differently_is_refused_and_the_mark_stays(grid):
    t = xs.mark_sharding(torch.ones(8, 4).to("jax"), grid, ("x", "y"))
    assert xs.mark_sharding(t, grid, (0, 1)) is t  # the same layout, said otherwise
    with pytest.raises(ShardingError, match=r"marked .*'x', 'y'.*clear_sharding"):
        xs.mark_sharding(t, grid, ("y", "x"))
    assert tuple(t.partition_spec) == ("x", "y")
    xs.sync()
    with pytest.raises(ShardingError, match=r"clear_sharding"):
        xs.mark_sharding(t, grid, (None, None))
    assert tuple(t.partition_spec) == ("x", "y") and t.sum() == 32
    xs.mark_sharding(xs.clear_sharding(t), grid, ("y", "x"))
    assert tuple(t.partition_spec) == ("y", "x") and t.sum() == 32


CPU_PARTNERS = {
    "add": lambda a, b: a + b,
    "matmul": lambda a, b: a @ b.t(),
    "cat": lambda a, b: torch.cat([a, b]),
    "in_place": lambda a, b: a.add_(b),
    "in_place_on_cpu": lambda a, b: b.add_(a),
    "out": lambda a, b: torch.add(a, a, out=b),
    "embedding": lambda a, b: torch.nn.functional.embedding(torch.tensor([0, 1]), a),
}


def test_a_cpu_tensor_mixed_with_a_jax_one_is_refused_and_neither_changes():
    a, b = torch.ones(2, 3, device="jax"), torch.full((2, 3), 2.0)
    for mixed in CPU_PARTNERS.values():
        with pytest.raises(RuntimeError, match=r"(?s)jax.*cpu"):
            mixed(a, b)
    assert a.tolist() == [[1.0] * 3] * 2 and b.tolist() == [[2.0] * 3] * 2


def test_a_model_on_the_cpu_refuses_a_jax_input():
    model, x = torch.nn.Linear(3, 2), torch.ones(1, 3, device="jax")
    with pytest.raises(RuntimeError, match=r"one on jax:0 and one on cpu.*\.to\('jax'\)"):
        model(x)
    assert torch.isfinite(model.to("jax")(x).cpu()).all()


def test_data_of_another_device_is_refused():
    t = torch.ones(3, device="jax")
    with pytest.raises(RuntimeError, match=r"cannot take the data of one on cpu"):
        t.data = torch.zeros(3)
    assert t.tolist() == [1, 1, 1]


@torch.library.custom_op("isoshard_tests::unknown", mutates_args=(), device_types="cpu")
def unknown(x: torch.Tensor) -> torch.Tensor:
    """An operator with a kernel for the CPU alone."""
    return x.clone()


@unknown.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_an_operator_without_lowering_is_named_with_the_way_out():
    x = torch.arange(3.0).to("jax")
    y = x + 1
    for _ in range(2):
        with pytest.raises(NotImplementedError, match=r"isoshard_tests.unknown.*register_lowering"):
            torch.ops.isoshard_tests.unknown(x)
    assert x.tolist() == [0, 1, 2] and y.tolist() == [1, 2, 3]


def test_an_error_while_recording_does_not_spoil_what_was_recorded():
    x = torch.arange(6.0).to("jax").reshape(2, 3)
    y = x * 2
    with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied"):
        y @ torch.ones(2, 2, device="jax")
    z = y + 1
    with pytest.raises(IndexError, match=r"Dimension out of range"):
        z.sum(5)
    assert z.tolist() == [[1, 3, 5], [7, 9, 11]]


def test_too_few_devices():
    with pytest.raises(DeviceError, match=r"needs 16 devices, there are 8.*simulate_devices\(16\)"):
        xs.Mesh(range(16), (4, 4), ("x", "y"))
    with pytest.raises(DeviceError, match=r"needs 16 devices, there are 8"):
        iso.make_mesh((4, 4), ("x", "y"))
    with pytest.raises(DeviceError, match=r"there are 8"):
        xs.Mesh([-1, 0], (2,), ("x",))


@pytest.mark.parametrize(("arguments", "message"), [
    ((range(8), (2, 3), ("x", "y")), r"Number of device IDs \(8\) must match mesh size \(6\)"),
    ((range(8), (2, 4), ("x",)), r"axis names \(1\) must match mesh dimensions \(2\)"),
    ((range(8), (2, 4), ("x", "x")), "Axis names must be unique"),
    (([0, 0, 1, 2], (2, 2), ("x", "y")), "Device IDs must be unique"),
])  # fmt: skip
def test_a_mesh_that_does_not_fit_together(arguments, message):
    with pytest.raises(ShardingError, match=message):
        xs.Mesh(*arguments)


def test_another_logical_device_is_refused():
    with pytest.raises(IndexError, match=r"one logical device, jax:0, and index 1 was requested"):
        xs.xla_device(1)
    assert xs.xla_device() == xs.xla_device(0) == torch.device("jax", 0)


def test_two_meshes_that_number_the_devices_differently(grid):
    data = torch.arange(32.0).reshape(8, 4)
    turned = xs.Mesh(list(reversed(range(8))), (2, 4), ("x", "y"))
    a = xs.mark_sharding(data.to("jax"), grid, ("x", None))
    b = xs.mark_sharding(data.to("jax"), turned, ("x", None))
    good = a * 3
    for _ in range(2):
        with pytest.raises(ShardingError, match=r"order the devices differently.*reshard"):
            a + b
        xs.sync()
    assert torch.equal(a.cpu(), data) and torch.equal(b.cpu(), data)
    assert torch.equal(good.cpu(), data * 3)
    assert torch.equal((a + iso.reshard(b, grid, P("x", None))).cpu(), 2 * data)
    assert torch.equal((b * 2).cpu(), 2 * data)


def test_two_meshes_in_one_sync(grid):
    turned = xs.Mesh(list(reversed(range(8))), (8,), ("x",))
    a = xs.mark_sharding(torch.arange(8.0).to("jax"), grid, (("x", "y"),)) * 3
    b = xs.mark_sharding(torch.arange(8.0).to("jax"), turned, ("x",)) * 2
    xs.sync()
    assert (a.cpu() + b.cpu()).tolist() == [5.0 * i for i in range(8)]


def test_two_meshes_with_the_same_devices_in_the_same_order_go_together(grid):
    data = torch.arange(32.0).reshape(8, 4)
    flat = iso.make_mesh((8,), ("d",))
    a = xs.mark_sharding(data.to("jax"), grid, ("x", "y"))
    b = xs.mark_sharding(data.to("jax"), flat, ("d", None))
    assert torch.equal((a + b).cpu(), 2 * data)


def test_a_mesh_without_devices_is_refused_with_the_fix():
    mesh = jax.sharding.AbstractMesh((8,), ("x",))
    t = torch.ones(8, device="jax")
    with pytest.raises(ShardingError, match=r"has no devices.*iso\.make_mesh"):
        xs.mark_sharding(t, mesh, ("x",))
    assert t.partition_spec is None


def test_a_mesh_must_be_a_mesh():
    with pytest.raises(TypeError, match=r"a mesh is a jax\.sharding\.Mesh.*not a int"):
        xs.mark_sharding(torch.ones(8, device="jax"), 8, ("x",))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_a_value_that_jax_cannot_hold_is_refused():
    with pytest.raises(TypeError, match=r"complex32 has no JAX counterpart; possible are bfloat16"):
        torch.zeros(2, dtype=torch.complex32).to("jax")


@torch.library.custom_op("isoshard_tests::broken", mutates_args=())
def broken(x: torch.Tensor) -> torch.Tensor:
    """An operator whose lowering fails while a program is compiled."""
    return x.clone()


@broken.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@pytest.fixture
def broken_lowering():
    def fail(x: jax.Array) -> jax.Array:
        raise ZeroDivisionError("this lowering is broken")

    xs.register_lowering("isoshard_tests::broken", fail)


def test_an_error_while_compiling_reaches_the_user_and_spoils_nothing_else(broken_lowering):
    x = torch.arange(3.0).to("jax")
    y = x + 1
    wrong = torch.ops.isoshard_tests.broken(x)
    z = y * 2
    with pytest.raises(ZeroDivisionError, match=r"this lowering is broken"):
        xs.sync()
    with pytest.raises(ZeroDivisionError, match=r"this lowering is broken"):
        wrong.cpu()
    del wrong
    assert z.tolist() == [2, 4, 6] and y.tolist() == [1, 2, 3]
    assert (x + 5).tolist() == [5, 6, 7]


def test_a_lazy_module_is_told_to_run_first():
    module = torch.nn.LazyLinear(3)
    with pytest.raises(RuntimeError, match=r"lazy module .* run it once on the CPU"):
        module.to("jax")
    module(torch.ones(2, 4))
    assert module.to("jax")(torch.ones(2, 4, device="jax")).shape == (2, 3)
