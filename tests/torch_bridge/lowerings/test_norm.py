"""Normalisations against CPU torch, forward and backward, and on meshes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import isoshard as iso
import isoshard.torch_bridge as xs
from benchmarks import collectives
from isoshard import P
from tests.torch_bridge.lowerings.harness import as_cpu, evaluate, evaluate_all

aten = torch.ops.aten
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
HALF = {"rtol": 2e-2, "atol": 2e-2}
MASK = [True, False, True]


def randn(*shape: int) -> torch.Tensor:
    torch.manual_seed(sum(shape))
    return torch.randn(shape) * 2 + 1


def test_norms_and_their_gradients():
    """With parameters and without, by group, in training and in evaluation."""
    cases = {}
    for shape, inner in (((4, 5), [5]), ((2, 3, 4), [3, 4]), ((6,), [6]), ((0, 3), [3])):
        x, weight, bias = randn(*shape), randn(*inner), randn(*inner)
        layer = lambda x, *parameters, n=inner: F.layer_norm(x, n, *parameters)  # noqa: E731
        cases[f"layers {shape}"] = (layer, x, weight, bias)
        cases[f"plain layers {shape}"] = (layer, x)
        if len(x):
            scaled = lambda x, w=None, n=inner: F.rms_norm(x, n, w)  # noqa: E731
            near = lambda x, w, n=inner: F.rms_norm(x, n, w.detach(), 1e-3)  # noqa: E731
            cases[f"squares {shape}"] = (scaled, x, weight)
            if len(shape) == 2:
                cases[f"squares {shape} by an epsilon"] = (near, x, weight)
    for shape, group in (((2, 6), 2), ((1, 6, 2, 3), 6), ((1, 6, 2, 3), 2)):
        grouped = lambda x, *parameters, n=group: F.group_norm(x, n, *parameters)  # noqa: E731
        cases[f"groups {shape} {group}"] = (grouped, randn(*shape), randn(6), randn(6))
        if group == 2:
            cases[f"plain groups {shape} {group}"] = (grouped, randn(*shape))
    for shape in ((4, 3), (2, 3, 2, 4)):
        for training in (True, False):

            def batch(x, mean, variance, *parameters, training=training):
                running = mean.detach().clone(), variance.detach().clone()
                out = F.batch_norm(x, *running, *parameters, training=training)
                return out, running  # in evaluation these are as they were

            given = randn(*shape), randn(3), randn(3).abs()
            if training or len(shape) == 4:
                cases[f"batch {shape} {training}"] = (batch, *given, randn(3), randn(3))
            if not training or len(shape) == 2:
                cases[f"plain batch {shape} {training}"] = (batch, *given)
    cases["no statistics"] = (lambda x: F.batch_norm(x, None, None, training=True), randn(4, 3))
    for dim, g in ((0, randn(4, 1, 1)), (2, randn(1, 1, 5))):
        cases[f"weights {dim}"] = (
            lambda v, g, dim=dim: aten._weight_norm_interface(v, g, dim)[0],
            *(randn(4, 3, 5), g),
        )
    as_cpu(cases, rtol=1e-3, atol=1e-4)


def test_gradients_that_are_not_asked_for_are_none():
    x, weight = randn(2, 3, 4), randn(3)
    statistics = [randn(3), randn(3).abs()] * 2
    layer = aten.native_layer_norm(x, [4], None, None, 1e-5)[1:]
    calls = [
        (aten.native_layer_norm_backward, (x, x, [4], *layer, None, None, [True] * 3), [0]),
        (aten.native_batch_norm_backward, (x, x, weight, *statistics, True, 1e-5, MASK), [0, 2]),
        (aten.native_group_norm_backward, (x, x, layer[0][:, :1, 0] * 0, layer[1][:, :1, 0], weight,
                                           2, 3, 4, 1, MASK), [0, 2]),
        (aten._fused_rms_norm_backward, (x, x, [4], layer[1], randn(4), [True, False]), [0]),
    ]  # fmt: skip
    found = evaluate_all([(op.default, given, {}) for op, given, _ in calls])
    for got, (op, _, wanted) in zip(found, calls, strict=True):
        assert [n for n, g in enumerate(got) if g is not None] == wanted, op


def test_layer_norm_keeps_half_precision_statistics_in_float32():
    x = (randn(4, 64) * 0.01 + 100).bfloat16()
    out, mean, _ = evaluate(aten.native_layer_norm.default, x, [64], None, None, 1e-5)
    np.testing.assert_allclose(out.astype("float32"), F.layer_norm(x.float(), [64]), **HALF)
    np.testing.assert_allclose(mean[:, 0].astype("float32"), x.float().mean(1), rtol=1e-2)


@pytest.mark.parametrize("training", [True, False])
def test_other_spellings_of_batch_norm(training):
    x, weight, running = randn(4, 3), randn(3), [randn(3), randn(3).abs()]
    common = (x, weight, weight, *running)
    want = aten._native_batch_norm_legit_functional(*common, training, 0.1, 1e-5)
    ops = [aten._native_batch_norm_legit_functional, aten._native_batch_norm_legit]
    calls = [(op.default, (*common, training, 0.1, 1e-5), {}) for op in ops]
    if training:
        others = aten._batch_norm_with_update, aten._batch_norm_with_update_functional
    else:
        others = aten._batch_norm_no_update, aten._native_batch_norm_legit_no_training
    calls += [(op.default, (*common, 0.1, 1e-5), {}) for op in others]
    first, second, *found = evaluate_all(calls)
    found = [[*out[:3], *out[4:]] if training else out[:1] for out in found]
    for results in (first, second, *found):
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


@pytest.mark.parametrize(
    ("mean", "spec"),
    [(0.0, P("x")), (0.0, P(None, "x")), (1000.0, P(("x", "y")))],
    ids=str,
)
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


def test_batch_norm_writes_what_it_saves_to_out():
    x, got = torch.randn(4, 3, 5), {}
    for device in ("cpu", "jax"):
        made = got[device] = []
        for train, length in itertools.product((True, False), (0, 3)):
            numbers = (torch.full((3,), k, device=device) for k in (1.5, 0.3, 0.2, 2.0))
            weight, bias, mean, var = numbers
            outs = tuple(torch.full((n,), 7.0, device=device) for n in (0, length, length))
            given = x.to(device), weight, bias, mean, var, train, 0.1, 1e-5
            torch.native_batch_norm(*given, out=outs)
            made += [*outs, mean, var]
    for one, other in zip(got["jax"], got["cpu"], strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one.cpu(), other, rtol=1e-5, atol=1e-6)


def test_group_norm_of_images_of_nothing_has_gradients():
    got = {}
    for device in ("cpu", "jax"):
        x = torch.ones(2, 6, 0, device=device, requires_grad=True)
        weight, bias = (torch.ones(6, device=device, requires_grad=True) for _ in range(2))
        try:
            F.group_norm(x, 3, weight, bias).sum().backward()
        except RuntimeError as error:  # torch 2.15 refuses them
            got[device] = [torch.empty(0)]
            assert "HxW to be greater than 0" in str(error)
            continue
        got[device] = [leaf.grad.cpu() for leaf in (x, weight, bias)]
    for one, other in zip(got["jax"], got["cpu"], strict=True):
        torch.testing.assert_close(one, other, equal_nan=True, rtol=0, atol=0)
