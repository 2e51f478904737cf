"""Where tensors and modules are made, and how modules change their device and dtype."""

from __future__ import annotations

import pytest
import torch

import isoshard.torch_bridge as xs
from tests.torch_bridge.training.test_training import close

# --- Where tensors are made ----------------------------------------------------------------------


def test_the_device_as_a_context_and_as_default():
    with torch.device("jax"):
        layer = torch.nn.Linear(2, 3)
        made = [torch.empty(2), torch.tensor([1.0]), torch.arange(3), torch.randn(2), layer.weight]
        assert torch.ones(1, device="cpu").device.type == "cpu"
    assert all(isinstance(t, xs.XLAShardedTensor) for t in made)
    assert torch.empty(1).device.type == "cpu"
    torch.set_default_device("jax")
    try:
        x = torch.zeros(2, 2)
        assert x.device.type == "jax" and torch.nn.Linear(2, 2)(x).device.type == "jax"
        assert torch.as_tensor([1.0]).device.type == "jax"
    finally:
        torch.set_default_device(None)
    assert torch.empty(1).device.type == "cpu"


def test_meta_modules_come_to_the_device():
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    model = model.to_empty(device="jax")
    for module in model:
        module.reset_parameters()
    assert all(t.device.type == "jax" for t in [*model.parameters(), *model.buffers()])
    assert isinstance(model[0].weight, torch.nn.Parameter)
    assert model(torch.ones(5, 3, device="jax")).shape == (5, 4)


def test_modules_change_their_dtype():
    layer = torch.nn.Linear(3, 2).to("jax")
    x = torch.ones(1, 3, device="jax")
    assert layer.to(torch.bfloat16)(x.bfloat16()).dtype == torch.bfloat16
    assert layer.half()(x.half()).dtype == torch.float16
    assert layer.float().weight.dtype == torch.float32 and layer(x).dtype == torch.float32
    both = torch.nn.Linear(3, 2).to("jax", torch.bfloat16)
    assert both.weight.dtype == torch.bfloat16 and both.weight.device.type == "jax"
    assert layer.double()(x.double()).dtype == torch.float64


def test_tensors_are_swapped():
    a, b = torch.zeros(2, device="jax"), torch.ones(3, device="jax")
    torch.utils.swap_tensors(a, b)
    assert a.tolist() == [1, 1, 1] and b.tolist() == [0, 0]


FLAGS = ["swap_module_params_on_conversion", "overwrite_module_params_on_conversion"]


@pytest.mark.parametrize("flag", FLAGS)
def test_flags_of_torchs_future(flag):
    future = torch.__future__
    old = getattr(future, f"get_{flag}")()
    getattr(future, f"set_{flag}")(True)
    try:
        layer = torch.nn.Linear(3, 2)
        want = layer.weight.detach().clone()
        layer.to("jax")
        close(layer.weight, want)
        assert layer(torch.ones(1, 3, device="jax")).shape == (1, 2)
        layer.load_state_dict({"weight": want * 2, "bias": torch.zeros(2)})
        close(layer.weight, want * 2)
        assert layer.cpu().weight.device.type == "cpu"
    finally:
        getattr(future, f"set_{flag}")(old)
