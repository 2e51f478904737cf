"""Normalisations against CPU torch, forward and backward."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from benchmarks import collectives
from isoshard import P
from tests.torch_bridge.lowerings.harness import check, evaluate

aten = torch.ops.aten
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
HALF = {"rtol": 2e-2, "atol": 2e-2}
MASKS = [[True, True, True], [True, False, True], [False, True, False]]


def randn(*shape: int) -> torch.Tensor:
    torch.manual_seed(sum(shape))
    return torch.randn(shape) * 2 + 1


# Layer norm

LAYERS = [((4, 5), [5]), ((2, 3, 4), [3, 4]), ((6,), [6]), ((0, 3), [3])]


@pytest.mark.parametrize(("shape", "inner"), LAYERS)
@pytest.mark.parametrize("affine", [True, False])
def test_layer_norm(shape, inner, affine):
    weight, bias = (randn(*inner), randn(*inner)) if affine else (None, None)
    check(aten.native_layer_norm.default, randn(*shape), inner, weight, bias, 1e-5, **CLOSE)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("shape", "inner"), LAYERS[:3])
def test_layer_norm_backward(shape, inner, mask):
    x, weight, bias = randn(*shape), randn(*inner), randn(*inner)
    _, mean, rstd = aten.native_layer_norm(x, inner, weight, bias, 1e-5)
    arguments = (torch.randn(shape), x, inner, mean, rstd, weight, bias, mask)
    check(aten.native_layer_norm_backward.default, *arguments, **CLOSE)


def test_layer_norm_backward_without_parameters():
    x = randn(4, 5)
    _, mean, rstd = aten.native_layer_norm(x, [5], None, None, 1e-5)
    got = evaluate(
        aten.native_layer_norm_backward.default, x, x, [5], mean, rstd, None, None, [True] * 3
    )
    assert got[1] is None
    assert got[2] is None


def test_layer_norm_keeps_half_precision_statistics_in_float32():
    x = (randn(4, 64) * 0.01 + 100).bfloat16()
    out, mean, _ = evaluate(aten.native_layer_norm.default, x, [64], None, None, 1e-5)
    want = torch.nn.functional.layer_norm(x.float(), [64])
    np.testing.assert_allclose(out.astype("float32"), want, **HALF)
    np.testing.assert_allclose(mean[:, 0].astype("float32"), x.float().mean(1), rtol=1e-2)


# RMS norm


@pytest.mark.parametrize(("shape", "inner"), LAYERS[:3])
@pytest.mark.parametrize("eps", [None, 1e-3])
def test_rms_norm(shape, inner, eps):
    x, weight = randn(*shape), randn(*inner)
    out, _ = evaluate(aten._fused_rms_norm.default, x, inner, weight, eps)
    np.testing.assert_allclose(out, torch.nn.functional.rms_norm(x, inner, weight, eps), rtol=1e-5)


@pytest.mark.parametrize("mask", [[True, True], [True, False]])
def test_rms_norm_backward(mask):
    x, weight, grad = randn(4, 5).requires_grad_(), randn(5).requires_grad_(), torch.randn(4, 5)
    want = torch.autograd.grad(
        torch.nn.functional.rms_norm(x, [5], weight, 1e-3), (x, weight), grad
    )
    rstd = (x.detach().square().mean(-1, keepdim=True) + 1e-3).rsqrt()
    got = evaluate(
        aten._fused_rms_norm_backward.default, grad, x.detach(), [5], rstd, weight.detach(), mask
    )
    np.testing.assert_allclose(got[0], want[0], **CLOSE)
    if mask[1]:
        np.testing.assert_allclose(got[1], want[1], **CLOSE)
    else:
        assert got[1] is None


# Group norm


@pytest.mark.parametrize("shape", [(2, 6), (2, 6, 3), (1, 6, 2, 3)])
@pytest.mark.parametrize("group", [1, 2, 6])
def test_group_norm(shape, group):
    x, weight, bias = randn(*shape), randn(6), randn(6)
    sizes = (shape[0], 6, x[0, 0].numel(), group)
    check(aten.native_group_norm.default, x, weight, bias, *sizes, 1e-2, **CLOSE)
    check(aten.native_group_norm.default, x, None, None, *sizes, 1e-2, **CLOSE)
    _, mean, rstd = aten.native_group_norm(x, weight, bias, *sizes, 1e-2)
    for mask in MASKS:
        arguments = (torch.randn(shape), x, mean, rstd, weight, *sizes, mask)
        check(aten.native_group_norm_backward.default, *arguments, rtol=1e-3, atol=1e-3)


# Batch norm

SHAPES = [(4, 3), (2, 3, 5), (2, 3, 2, 4)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_in_training_updates_its_statistics(shape, affine):
    x, running = randn(*shape), [torch.zeros(3), torch.ones(3)]
    weight, bias = (randn(3), randn(3)) if affine else (None, None)
    got = evaluate(aten.native_batch_norm.default, x, weight, bias, *running, True, 0.1, 1e-5)
    want = aten.native_batch_norm(x, weight, bias, *running, True, 0.1, 1e-5)
    for have, wish in zip(got, (*want, *running), strict=True):
        np.testing.assert_allclose(have, wish, **CLOSE)


@pytest.mark.parametrize("shape", SHAPES)
def test_batch_norm_in_evaluation_leaves_its_statistics(shape):
    x, mean, variance = randn(*shape), randn(3), randn(3).abs()
    arguments = (x, randn(3), randn(3), mean, variance, False, 0.1, 1e-5)
    out, _, _, new_mean, new_variance = evaluate(aten.native_batch_norm.default, *arguments)
    np.testing.assert_allclose(out, aten.native_batch_norm(*arguments)[0], **CLOSE)
    np.testing.assert_array_equal(new_mean, mean)
    np.testing.assert_array_equal(new_variance, variance)


def test_batch_norm_without_statistics():
    x = randn(4, 3)
    check(aten.native_batch_norm.default, x, None, None, None, None, True, 0.1, 1e-5, **CLOSE)
    check(aten._native_batch_norm_legit.no_stats, x, None, None, True, 0.1, 1e-5, **CLOSE)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["_native_batch_norm_legit", "native_batch_norm"])
def test_batch_norm_into_given_memory(name, training):
    x, weight, bias, mean, variance = randn(4, 3, 5), randn(3), randn(3), randn(3), randn(3).abs()
    results = {}
    for device in ("cpu", "jax"):
        running = [mean.clone().to(device), variance.clone().to(device)]
        moved = [tensor.to(device) for tensor in (x, weight, bias)]
        saved = 3 if training else 0
        names = {"out": x.shape, "save_mean": (saved,), "save_invstd": (saved,)}
        out = {key: torch.empty(shape).to(device) for key, shape in names.items()}
        got = getattr(aten, name).out(*moved, *running, training, 0.1, 1e-5, **out)
        assert all(have is given for have, given in zip(got, out.values(), strict=True))
        results[device] = [tensor.cpu() for tensor in (*got, *running)]
    torch.testing.assert_close(results["jax"], results["cpu"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("training", [True, False])
def test_other_spellings_of_batch_norm(training):
    x, weight, running = randn(4, 3), randn(3), [randn(3), randn(3).abs()]
    common = (x, weight, weight, *running)
    want = aten._native_batch_norm_legit_functional(*common, training, 0.1, 1e-5)
    got = {
        "functional": evaluate(
            aten._native_batch_norm_legit_functional.default, *common, training, 0.1, 1e-5
        ),
        "legit": evaluate(aten._native_batch_norm_legit.default, *common, training, 0.1, 1e-5),
    }
    if training:
        update = aten._batch_norm_with_update, aten._batch_norm_with_update_functional
        for op in update:
            out = evaluate(op.default, *common, 0.1, 1e-5)
            got[str(op)] = [*out[:3], *out[4:]]
    else:
        for op in aten._batch_norm_no_update, aten._native_batch_norm_legit_no_training:
            got[str(op)] = evaluate(op.default, *common, 0.1, 1e-5)[:1]
    for results in got.values():
        np.testing.assert_allclose(results[0], want[0], **CLOSE)
        for have, wish in zip(results[3:], want[3 : len(results)], strict=True):
            np.testing.assert_allclose(have, wish, **CLOSE)


def test_batch_norm_of_bfloat16_keeps_float32_statistics():
    x, ones = randn(8, 3).bfloat16(), torch.ones(3)
    running = [torch.zeros(3), torch.ones(3)]
    got = evaluate(aten.native_batch_norm.default, x, ones, ones, *running, True, 0.1, 1e-5)
    want = aten.native_batch_norm(x, ones, ones, *running, True, 0.1, 1e-5)
    assert [g.dtype.name for g in got] == ["bfloat16", *["float32"] * 4]
    np.testing.assert_allclose(got[0].astype("float32"), want[0].float(), **HALF)
    np.testing.assert_allclose(got[3], running[0], **CLOSE)


@pytest.mark.parametrize("mask", MASKS[:2])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_batch_norm_backward(shape, training, mask):
    x, grad, weight = randn(*shape), torch.randn(shape), randn(3)
    running = [randn(3), randn(3).abs()]
    saved = aten.native_batch_norm(x, weight, weight, *running, training, 0.1, 1e-5)[1:]
    arguments = (grad, x, weight, *running, *saved, training, 1e-5, mask)
    if not training:  # torch saves nothing then; we never read it
        arguments = (grad, x, weight, *running, running[0], running[0], training, 1e-5, mask)
    check(aten.native_batch_norm_backward.default, *arguments, rtol=1e-3, atol=1e-3)


# Weight norm


@pytest.mark.parametrize("dim", [0, 2])
def test_weight_norm(dim):
    v = randn(4, 3, 5)
    g = randn(4, 1, 1) if dim == 0 else randn(1, 1, 5)
    check(aten._weight_norm_interface.default, v, g, dim, **CLOSE)
    grad, norms = torch.randn(v.shape), aten._weight_norm_interface(v, g, dim)[1]
    check(aten._weight_norm_interface_backward.default, grad, v, g, norms, dim, **CLOSE)


@pytest.mark.parametrize("mean", [0.0, 1000.0])
@pytest.mark.parametrize("spec", [P("x"), P("y"), P(None, "x"), P(("x", "y"))])
def test_batch_norm_of_a_split_batch_needs_one_collective(mean, spec):
    mesh = iso.make_mesh((4, 2), ("x", "y"))
    module = torch.nn.BatchNorm2d(8)
    x = torch.randn(16, 8, 3, 3, generator=torch.Generator().manual_seed(0)) + mean
    exact = torch.nn.BatchNorm2d(8).double()(x.double())
    module(x)
    split = iso.shard(torch.nn.BatchNorm2d(8), mesh, P())
    step = xs.compile(lambda images: split(images).detach())
    got = step(iso.shard(x, mesh, spec)).cpu()
    # The mean is rounded to float32; by the mean of squares the error would be far larger.
    assert (got - exact).abs().max() <= 2 * torch.finfo(torch.float32).eps * (10 + mean)
    torch.testing.assert_close(split.running_mean.cpu(), module.running_mean, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(split.running_var.cpu(), module.running_var, rtol=1e-4, atol=1e-5)
    if spec != P(None, "x"):
        assert sum(count for count, _ in collectives.summarize(xs.program_text(step)).values()) == 1


@pytest.mark.parametrize("train", (True, False))
@pytest.mark.parametrize("length", (0, 3))
def test_batch_norm_writes_what_it_saves_to_out(train, length):
    x, got = torch.randn(4, 3, 5), {}
    for device in ("cpu", "jax"):
        weight, bias, mean, var = (torch.full((3,), k, device=device) for k in (1.5, 0.3, 0.2, 2.0))
        outs = tuple(torch.full((n,), 7.0, device=device) for n in (0, length, length))
        torch.native_batch_norm(x.to(device), weight, bias, mean, var, train, 0.1, 1e-5, out=outs)
        got[device] = [each.cpu() for each in (*outs, mean, var)]
    for one, other in zip(got["jax"], got["cpu"], strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_group_norm_of_images_of_nothing_has_gradients():
    got = {}
    for device in ("cpu", "jax"):
        x = torch.ones(2, 6, 0, device=device, requires_grad=True)
        weight, bias = (torch.ones(6, device=device, requires_grad=True) for _ in range(2))
        try:
            torch.nn.functional.group_norm(x, 3, weight, bias).sum().backward()
        except RuntimeError as error:  # torch 2.15 refuses them
            got[device] = [torch.empty(0)]
            assert "HxW to be greater than 0" in str(error)
            continue
        got[device] = [leaf.grad.cpu() for leaf in (x, weight, bias)]
    for one, other in zip(got["jax"], got["cpu"], strict=True):
        torch.testing.assert_close(one, other, equal_nan=True, rtol=0, atol=0)
