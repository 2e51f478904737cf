"""Operators over space on images in blocks of unequal sizes: as torch has them, by halos."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.nn import functional as F

import isoshard as iso
from isoshard import P
from isoshard.torch_bridge.lowerings import channels_last
from tests.domain.blocks import in_blocks
from tests.domain.traffic import gathered

RNG = np.random.default_rng(0)
X = torch.tensor(RNG.normal(size=(2, 4, 18, 7)))
WEIGHT = torch.tensor(RNG.normal(size=(6, 2, 3, 3)))
TRANSPOSED = torch.tensor(RNG.normal(size=(4, 3, 3, 3)))
SIZES = (5, 2, 7, 4)

OPERATORS = {
    "conv, same": lambda x, w, t: F.conv2d(x, w, padding="same", dilation=2, groups=2),
    "transposed": lambda x, w, t: F.conv_transpose2d(x, t, None, 2, 1, output_padding=1),
    "max": lambda x, w, t: F.max_pool2d(x, 3, 2, 1),
    "mean": lambda x, w, t: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
    "adaptive": lambda x, w, t: F.adaptive_avg_pool2d(x, (5, 4)),
    "linear": lambda x, w, t: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "nearest": lambda x, w, t: F.interpolate(x, scale_factor=1.5, mode="nearest"),
    "reflect": lambda x, w, t: F.pad(x, (1, 2, 3, 4), mode="reflect"),
    "constant": lambda x, w, t: F.pad(x, (1, 2, 3, -4), value=2.5),
    "roll": lambda x, w, t: torch.roll(x, 5, 2),
    "cumsum": lambda x, w, t: x.cumsum(2),
    "cummax": lambda x, w, t: torch.cummax(x, 2)[0],
    "group norm": lambda x, w, t: F.group_norm(x, 2),
    "unfold": lambda x, w, t: F.unfold(x, 3, padding=1),
    "pixel shuffle": lambda x, w, t: F.pixel_shuffle(x, 2),
}
KEPT = {"conv, same", "roll", "cumsum", "cummax"}


LEARNED = {"conv, same", "transposed", "max", "mean", "linear", "reflect", "pixel shuffle"}
"""Others have gradients of their kind, or in tests of rows."""


def run(operators, x, *weights):
    """The results, and the gradients of a number that depends on `LEARNED`."""
    x, *weights = (tensor.requires_grad_() for tensor in (x, *weights))
    results = {name: operator(x, *weights) for name, operator in operators.items()}
    loss = sum((torch.tanh(results[name]) ** 2).sum() for name in sorted(LEARNED))
    loss.backward()
    return {name: result.detach() for name, result in results.items()}, x.grad, weights


def test_as_torch():
    sizes = (0, 3, 9, 6)
    mesh = iso.make_mesh((4,), ("x",))
    spec = P(None, None, "x")
    x = iso.shard(X.float(), mesh, spec, uneven="pad", sizes={2: sizes})
    weights = [weight.float().to("jax") for weight in (WEIGHT, TRANSPOSED)]
    results, slope, weights = run(OPERATORS, x, *weights)
    want, want_slope, want_weights = run(OPERATORS, X.clone(), WEIGHT.clone(), TRANSPOSED.clone())
    for name, result in results.items():
        np.testing.assert_allclose(result.cpu(), want[name], rtol=1e-4, atol=1e-4, err_msg=name)
        if result.ndim == 4:
            kept = iso.to_jax(result).sizes[2]
            assert (kept == sizes) if name in KEPT else kept, name
    np.testing.assert_allclose(slope.cpu(), want_slope, rtol=1e-4, atol=1e-4)
    assert iso.to_jax(slope).sizes[2] == sizes
    for weight, other in zip(weights, want_weights, strict=True):
        np.testing.assert_allclose(weight.grad.cpu(), other.grad, rtol=1e-4, atol=2e-3)


def last(x, w):
    """Operators of torch on images with their channels at the end, and a gradient."""
    options = ([1, 1], [1, 1], [1, 1], False, [0, 0], 2)
    x = jnp.moveaxis(x, 1, -1)
    out = channels_last.VARIANTS["aten::convolution"].function(x, w, None, *options)
    pull = channels_last.VARIANTS["aten::convolution_backward"].function
    image, weight, _ = pull(jnp.sin(out), x, w, [6], *options, [True, True, False])
    norm = channels_last.VARIANTS["aten::native_batch_norm"].function
    return image, weight, norm(x, None, None, None, None, True, 0.1, 1e-5)[0]


def test_no_rows_are_gathered():
    mesh = iso.make_mesh((4,), ("x",))
    x = X.numpy().astype(np.float32)
    u = in_blocks(x, mesh, P(None, None, "x"), (None, None, SIZES, None))
    weight = WEIGHT.numpy().astype(np.float32)
    program = jax.jit(iso.domain.lift(last)).lower(u, weight).compile()
    results, want = program(u, weight), jax.jit(last)(x, weight)
    for found, other in zip(results, want, strict=True):
        np.testing.assert_allclose(iso.full(found), other, rtol=1e-3, atol=1e-3)
        if isinstance(found, iso.UnevenArray):
            assert SIZES in found.sizes
    assert gathered(program.as_text()) == 0
