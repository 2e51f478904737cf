"""Making tensors on the `jax` device, moving them there, and their dtypes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    """Same values, dtype, shape and strides, and a tensor of ours."""
    assert isinstance(got, xs.XLAShardedTensor)
    assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
    torch.testing.assert_close(got.detach().cpu(), want.detach())


# --- Making tensors ------------------------------------------------------------------------------

FACTORIES: dict[str, Callable[[Any], torch.Tensor]] = {
    "zeros": lambda d: torch.zeros(2, 3, device=d),
    "full": lambda d: torch.full((2, 3), 7, device=d),
    "arange": lambda d: torch.arange(5, device=d),
    "arange step": lambda d: torch.arange(10, 0, -3, device=d),
    "arange dtype": lambda d: torch.arange(1, 4, dtype=torch.float16, device=d),
    "linspace": lambda d: torch.linspace(-1, 1, 7, device=d),
    "logspace": lambda d: torch.logspace(0, 2, 3, device=d),
    "eye wide": lambda d: torch.eye(2, 4, device=d),
    "tensor": lambda d: torch.tensor([[1, 2], [3, 4]], device=d),
    "tensor empty": lambda d: torch.tensor([], device=d),
    "tensor complex": lambda d: torch.tensor([1 + 2j], device=d),
    "tensor numpy": lambda d: torch.tensor(np.arange(3, dtype=np.int16), device=d),
    "as_tensor": lambda d: torch.as_tensor([1.0, 2.0], device=d),
    "asarray": lambda d: torch.asarray([1.0, 2.0], device=d),
    "scalar_tensor": lambda d: torch.scalar_tensor(3.0, device=d),
    "tril_indices": lambda d: torch.tril_indices(3, 3, device=d),
    "ones_like": lambda d: torch.ones_like(torch.zeros(2, 3, device=d), dtype=torch.int32),
    "full_like": lambda d: torch.full_like(torch.ones(2, 3, device=d), 4),
    "new_zeros": lambda d: torch.ones(2, device=d).new_zeros(3, 2),
    "new_tensor": lambda d: torch.ones(2, device=d).new_tensor([1.0, 2.0]),
    "complex": lambda d: torch.complex(torch.ones(2, device=d), torch.zeros(2, device=d)),
    "meshgrid": lambda d: torch.meshgrid(*[torch.arange(3, device=d)] * 2, indexing="ij")[1],
    "hann_window": lambda d: torch.hann_window(4, device=d),
    "zeros of no elements": lambda d: torch.zeros(0, 3, device=d),
}


def test_factories_make_what_they_make_on_the_cpu():
    for name, got in {name: make("jax") for name, make in FACTORIES.items()}.items():
        want = FACTORIES[name]("cpu")
        assert isinstance(got, xs.XLAShardedTensor), name
        assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride()), name
        torch.testing.assert_close(got.cpu(), want, msg=name)


def test_a_device_context_and_a_default_device():
    with torch.device("jax"):
        assert (torch.ones(2) + torch.arange(2)).tolist() == [1, 2]
        assert torch.nn.Linear(2, 3).weight.device.type == "jax"
    assert torch.ones(2).device.type == "cpu"


def test_empty_tensors_have_the_shape_asked_for():
    for made in (
        torch.empty(2, 3, device="jax"),
        torch.empty_like(torch.ones(2, 3, device="jax")),
        torch.ones(1, device="jax").new_empty(2, 3),
        torch.empty_strided((2, 3), (3, 1), device="jax"),
    ):
        assert made.shape == (2, 3) and made.is_contiguous() and made.device.type == "jax"
        made.fill_(4)
        assert made.tolist() == [[4.0] * 3] * 2


def test_empty_tensors_of_any_stride():
    odd = torch.from_numpy(np.random.default_rng(0).integers(-3, 4, (0, 6)))
    assert odd.to("jax").cpu().shape == (0, 6)
    assert torch.zeros(0, 3, device="jax").t().add_(1).tolist() == [[], [], []]
    assert torch.zeros(3, 0, device="jax").sum(1).tolist() == [0, 0, 0]


def test_channels_last_memory_is_kept():
    want = torch.arange(48.0).reshape(2, 2, 3, 4).contiguous(memory_format=torch.channels_last)
    got = want.to("jax")
    same(got, want)
    same(got.clone(), want.clone())
    same(got + 1, want + 1)
    assert got.is_contiguous(memory_format=torch.channels_last)
    same(got.contiguous(), want.contiguous())


# --- Device and dtype ----------------------------------------------------------------------------


def test_the_device_is_jax():
    t = torch.ones(2, device="jax")
    assert t.device == torch.device("jax", 0) == torch.device("jax:0") == xs.xla_device()
    assert str(t.device) == "jax:0" and t.device.type == "jax"
    assert not t.is_cuda and not t.is_cpu and not t.is_meta
    assert torch.empty_like(t).device == t.device
    assert torch.ones(2).to(t.device).device == t.device
    assert torch.ones(2).to(t).device == t.device and t.to(torch.ones(2)).device.type == "cpu"
    assert isinstance(t, torch.Tensor) and isinstance(t, xs.XLAShardedTensor)


def test_moving_between_devices():
    want = torch.arange(6.0).reshape(2, 3).t()
    same(want.to("jax"), want)
    same(want.to("jax", torch.float16), want.half())
    same(want.to(device="jax", copy=True, non_blocking=True), want)
    back = want.to("jax").cpu()
    assert type(back) is torch.Tensor and torch.equal(back, want)
    t = want.to("jax")
    assert t.to("jax") is t and t.to(t.device) is t and t.to(torch.float32) is t
    assert t.to("jax", copy=True) is not t
    target = torch.zeros(3, 2)
    assert torch.equal(target.copy_(t), want)
    host = torch.ones(2)
    moved = host.to("jax")
    host.zero_()
    assert moved.tolist() == [1, 1]


def test_a_module_moves_and_keeps_its_parameters():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    weight = model[0].weight.detach().clone()
    model.to("jax")
    assert isinstance(model[0].weight, torch.nn.Parameter)
    assert all(t.device.type == "jax" for t in model.state_dict().values())
    assert model[1].num_batches_tracked.dtype == torch.int64
    model.to("cpu")
    assert torch.equal(model[0].weight, weight) and type(model[0].weight) is torch.nn.Parameter
    assert model.to("jax").half()[0].weight.dtype == torch.float16
    assert model.to("jax").bfloat16()[0].weight.device.type == "jax"


def test_promotion_equals_the_cpu():
    makers = [
        lambda d: torch.ones(2, dtype=torch.bfloat16, device=d),
        lambda d: torch.ones(2, dtype=torch.int32, device=d),
        lambda d: torch.ones(2, dtype=torch.uint8, device=d),
        lambda d: torch.ones(2, dtype=torch.bool, device=d),
        lambda d: torch.tensor(2.0, device=d),
        lambda d: torch.tensor(2, device=d),
        lambda d: torch.tensor(True, device=d),
        lambda d: 2,
        lambda d: 2.5,
        lambda d: True,
    ]
    for a in makers[:7]:
        for b in makers:
            for op in (torch.add, torch.mul, torch.true_divide, torch.gt, torch.maximum):
                if op is torch.maximum and not isinstance(b("cpu"), torch.Tensor):
                    continue
                want, got = op(a("cpu"), b("cpu")), op(a("jax"), b("jax"))
                assert got.dtype == want.dtype, (op, want.dtype, got.dtype)
    same(torch.ones(3, dtype=torch.uint8, device="jax").sum(), torch.tensor(3))
    same(torch.ones(3, dtype=torch.bool, device="jax").cumsum(0), torch.tensor([1, 2, 3]))
    with pytest.raises(RuntimeError, match=r"(?i)dtype|floating"):
        torch.ones(3, dtype=torch.int64, device="jax").mean()


def test_a_zero_dimensional_cpu_tensor_takes_part():
    t = torch.ones(2, dtype=torch.bfloat16, device="jax")
    assert (t * torch.tensor(2.0)).dtype == torch.bfloat16
    assert (torch.tensor(3) - t).tolist() == [2, 2]
    assert torch.where(t > 0, torch.tensor(5.0), t).tolist() == [5, 5]
    t.mul_(torch.tensor(4))
    assert t.tolist() == [4, 4]
    number = torch.tensor(1.0)
    later = t + number
    number.fill_(100)
    assert later.tolist() == [5, 5]


def test_float64_of_the_cpu_is_converted_where_torch_converts():
    t = torch.zeros(2, device="jax")
    assert t.copy_(torch.ones(2, dtype=torch.float64)).tolist() == [1, 1]
    product = t * torch.tensor(2.0, dtype=torch.float64)
    assert product.dtype == torch.float32 and product.tolist() == [2, 2]


def test_a_module_goes_by_a_plan_to_a_mesh_in_any_form():
    mesh = xs.Mesh(range(8), (2, 4), ("x", "y"))
    model = iso.reshard(torch.nn.Linear(8, 8), mesh, iso.Plan({"weight": ("x",)}))
    assert model.weight.named_sharding.mesh == mesh.get_jax_mesh()
    assert model.weight.partition_spec == iso.P("x")


class Tied(torch.nn.Module):
    """Buffers that share memory, one transposed, and parameters."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.arange(6.0).reshape(2, 3))
        self.register_buffer("turned", self.table.t())
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.weight.grad = torch.ones(2)


def copied(device):
    """What copies of tensors that share memory are, and what a write to one of them shows."""
    a = torch.arange(6.0, device=device)
    a.label = ["mine"]
    grown, row, other = copy.deepcopy([a, a[:2], a.view(2, 3).t()])
    row.add_(10)
    flat, bits = copy.deepcopy((a, a.view(torch.int32)))
    bits[0] = 0x40000000
    wide, alone = copy.deepcopy([a[:1].expand(3), a[2:4]])
    module = Tied()
    if device == "jax":
        tensors = {name: buffer.to(device) for name, buffer in module.named_buffers()}
        module.to(device)
        module.table = tensors["table"]
        module.turned = module.table.t()
    again = copy.deepcopy(module)
    again.table[0, 1] = 7
    return (
        [grown, other, flat, wide, alone, again.turned, module.turned, a],
        [x.stride() for x in (grown, row, other, wide, alone, again.turned)],
        [grown.label, grown.label is a.label, again.weight.grad, again.weight.requires_grad],
        [alone.untyped_storage().nbytes(), alone.storage_offset()],
        row.untyped_storage().data_ptr() == grown.untyped_storage().data_ptr(),
    )


def test_deep_copies_share_memory_as_what_they_copy():
    want, got = copied("cpu"), copied("jax")
    assert [x.tolist() for x in got[0]] == [x.tolist() for x in want[0]]
    assert got[1:] == want[1:]


def test_deep_copies_of_a_sharded_tensor_share_memory(mesh):
    x = xs.mark_sharding(torch.arange(8.0, device="jax"), mesh, ("y",))
    whole, part = copy.deepcopy([x, x[4:]])
    part.zero_()
    assert whole.tolist() == [0, 1, 2, 3, 0, 0, 0, 0]
    assert whole.partition_spec == P("y")
    assert x.tolist() == list(range(8))

    @xs.compile
    def step(t):
        ours, its = copy.deepcopy([t, t[:2]])
        its.add_(1)
        return ours.add_(1)

    assert [step(x).tolist() for _ in range(3)][2] == [2, 3, 3, 4, 5, 6, 7, 8]


def test_lazy_clones_are_copies():
    for device in ("cpu", "jax"):
        a = torch.ones(2, device=device)
        b = a._lazy_clone()
        total = a + b
        b.add_(1)
        a.mul_(4)
        assert [x.tolist() for x in (a, b, total)] == [[4, 4], [2, 2], [2, 2]]


def test_shallow_copies_are_over_the_same_memory():
    results = []
    for device in ("cpu", "jax"):
        a = torch.arange(4.0, device=device)
        a.label = ["mine"]
        b, row = copy.copy(a), copy.copy(a[1:].view(torch.int32))
        b.add_(1)
        row[0] = 0
        weight = torch.nn.Parameter(torch.ones(2, device=device))
        again = copy.copy(weight)
        with torch.no_grad():
            again.mul_(3)
        facts = again.requires_grad, again.is_leaf, row.storage_offset(), row.dtype
        results.append(
            (
                [x.tolist() for x in (a, b, row, weight)],
                b.label is a.label,
                isinstance(again, torch.nn.Parameter),
                facts,
            )
        )
    assert results[0] == results[1]
