"""Fake quantization: torch's values, and its gradient: straight through inside of the range."""

import jax
import numpy as np
import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs

AWKWARD = [0.5, 1.5, 2.5, -0.5, 0.25, -3.05, 12.7, 12.75, 12.8, -12.85, 1e30, -1e30]
AWKWARD += [0.0, -0.0, float("inf"), -float("inf"), float("nan")]


def by_tensor(x):
    return torch.fake_quantize_per_tensor_affine(x, 0.1, 3, -128, 127)


def by_tensors(x):
    scale, point = torch.tensor(0.3), torch.tensor(3, dtype=torch.int32)
    return torch.fake_quantize_per_tensor_affine(x, scale.to(x.device), point.to(x.device), -8, 7)


def by_channel(x):
    scale, point = torch.tensor([0.1, 0.3]), torch.tensor([3, -2], dtype=torch.int32)
    return torch.fake_quantize_per_channel_affine(
        x, scale.to(x.device), point.to(x.device), 1, -128, 127
    )


FORMS = {"tensor": by_tensor, "tensors": by_tensors, "channel": by_channel}
EACH = pytest.mark.parametrize("form", FORMS)


def values(dtype=torch.float32):
    random = torch.from_numpy(np.random.default_rng(0).standard_normal(47) * 8)
    x = torch.cat([torch.tensor(AWKWARD, dtype=torch.float64), random]).to(dtype)
    return torch.stack([x, x.flip(0)], 1)


def gradient(function, x):
    x = x.detach().clone().requires_grad_()
    made = function(x)
    weights = torch.arange(made.numel(), device=x.device, dtype=made.dtype).view(made.shape)
    (made.nan_to_num() * weights).sum().backward()
    return made.detach(), x.grad


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_values_and_gradients_of_torch(form, dtype):
    x = values(dtype)
    want, by = gradient(FORMS[form], x)
    got, found = gradient(FORMS[form], x.to("jax"))
    assert got.dtype == want.dtype
    torch.testing.assert_close(got.cpu(), want, rtol=1e-6, atol=0)
    torch.testing.assert_close(found.cpu(), by, rtol=0, atol=0)


@EACH
def test_compiled_steps_and_jax(form):
    x = values()
    want, by = gradient(FORMS[form], x)
    step = xs.compile(lambda x: gradient(FORMS[form], x))
    for _ in range(2):
        got, found = step(x.to("jax"))
        torch.testing.assert_close(got.cpu(), want, rtol=1e-6, atol=0)
        torch.testing.assert_close(found.cpu(), by, rtol=0, atol=0)
    weights = torch.arange(want.numel(), dtype=torch.float32).view(want.shape)

    def loss(x):
        return (FORMS[form](x).nan_to_num() * weights.to(x.device)).sum()

    in_jax = jax.grad(iso.jax_function(loss))(x.numpy())
    np.testing.assert_array_equal(in_jax, by)


def learned(x, scale, zero_point):
    return torch._fake_quantize_learnable_per_tensor_affine(x, scale, zero_point, -8, 7, 0.5)


def learned_channels(x, scale, zero_point):
    return torch._fake_quantize_learnable_per_channel_affine(x, scale, zero_point, 1, -8, 7, 0.5)


@pytest.mark.parametrize(
    ("form", "scale", "zero_points"),
    [
        (learned, [0.5], ([0.0], [1.4], [-2.5], [0.5], [-20.5], [9.0])),
        (learned_channels, [0.3, 0.5], ([0.0, 1.6], [-2.5, 0.5], [-20.5, 9.0])),
    ],
)
def test_scales_and_zero_points_that_are_trained(form, scale, zero_points):
    """Learned step size quantization: below, above and inside of the range, and points at ties."""
    x = values()[17:]  # of finite numbers and some that are not
    x = x[x.isfinite().all(1)].clamp(-1e3, 1e3)
    weights = torch.linspace(-1, 1, x.numel()).view(x.shape)
    for zero_point in zero_points:
        results = []
        for device in ("cpu", "jax"):
            inputs = [torch.tensor(one, device=device) for one in (scale, zero_point)]
            inputs = [leaf.requires_grad_() for leaf in (x.clone().to(device), *inputs)]
            result = form(*inputs)
            (result * weights.to(device)).sum().backward()
            results.append([result.detach().cpu(), *[leaf.grad.cpu() for leaf in inputs]])
        torch.testing.assert_close(*reversed(results), rtol=1e-5, atol=1e-4)


def test_products_with_rows_of_8_bits():
    random = torch.Generator().manual_seed(0)
    x = torch.randn(5, 64, generator=random)
    weight = torch.randint(-128, 128, (32, 64), dtype=torch.int8, generator=random)
    scales = torch.rand(32, generator=random) / 64
    for dtype in (torch.float32, torch.bfloat16):
        args = x.to(dtype), weight, scales.to(dtype)
        want = torch._weight_int8pack_mm(*args)
        got = torch._weight_int8pack_mm(*[arg.to("jax") for arg in args])
        assert got.dtype == want.dtype
        torch.testing.assert_close(got.cpu(), want)


def test_a_scale_that_changes_compiles_nothing():
    x = values().to("jax")

    def made(scale):
        return torch.fake_quantize_per_tensor_affine(x, scale, 0, -128, 127).cpu()

    made(0.1), made(0.2)
    iso.metrics.reset()
    made(0.3)
    assert iso.metrics.counters()["compilations"] == 0


def test_layers_of_torch_ao():
    quantize = torch.ao.quantization.FakeQuantize()
    x = values()[17:-17]  # of finite numbers
    want = quantize(x)
    got = torch.ao.quantization.FakeQuantize().to("jax")(x.to("jax"))
    torch.testing.assert_close(got.cpu(), want, rtol=1e-6, atol=1e-7)
