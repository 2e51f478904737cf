"""Dtypes and shapes that torch's kernels do not know are refused at the call, as on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import isoshard.torch_bridge as xs  # noqa: F401


def _image(device, dtype):
    return torch.arange(7 * 7 * 2).remainder(5).reshape(1, 2, 7, 7).to(device, dtype)


KERNELS = {
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 3),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, 3, return_indices=True),
    "adaptive_max_pool1d": lambda x: F.adaptive_max_pool1d(x[0], 3),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 2),
    "max_pool2d": lambda x: F.max_pool2d(x, 2),
    "max_pool3d": lambda x: F.max_pool3d(x, (1, 2, 2)),
    "max_unpool2d": lambda x: F.max_unpool2d(x, torch.zeros_like(x, dtype=torch.int64), 1),
    "unfold": lambda x: F.unfold(x, 2),
    "reflect": lambda x: F.pad(x, (1, 1), mode="reflect"),
    "replicate": lambda x: F.pad(x, (1, 1), mode="replicate"),
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "hardtanh": F.hardtanh,
    "elu": F.elu,
    "elu_": F.elu_,
    "selu": F.selu,
    "gelu": F.gelu,
    "glu": lambda x: F.glu(x, 1),
    "leaky_relu": F.leaky_relu,
    "mish": F.mish,
    "silu": F.silu,
    "logsigmoid": F.logsigmoid,
    "softplus": F.softplus,
    "softmax": lambda x: x.softmax(1),
    "log_softmax": lambda x: x.log_softmax(1),
    "layer_norm": lambda x: F.layer_norm(x, (7,)),
    "group_norm": lambda x: F.group_norm(x, 2),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "mse_loss": lambda x: F.mse_loss(x, x),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, x),
    "soft_margin_loss": lambda x: F.soft_margin_loss(x, x),
    "nll_loss": lambda x: F.nll_loss(x, torch.zeros(1, 7, 7, dtype=torch.int64, device=x.device)),
    "multi_margin_loss": lambda x: F.multi_margin_loss(
        x[0, 0], torch.zeros(7, dtype=torch.int64, device=x.device)
    ),
    "conv2d": lambda x: F.conv2d(x, x),
    "conv_transpose2d": lambda x: F.conv_transpose2d(x, x[0, :, None]),
    "mm": lambda x: x[0, 0] @ x[0, 0],
    "addmm": lambda x: torch.addmm(x[0, 0], x[0, 0], x[0, 0]),
    "addcmul": lambda x: torch.addcmul(x, x, x),
    "lerp": lambda x: torch.lerp(x, x, 0.5),
    "trace": lambda x: x[0, 0].trace(),
    "cross": lambda x: torch.linalg.cross(x[..., :3], x[..., :3]),
    "scatter_reduce": lambda x: x.scatter_reduce(
        0, torch.zeros_like(x, dtype=torch.int64), x, "mean"
    ),
    "lu": torch.linalg.lu,
    "solve_triangular": lambda x: torch.linalg.solve_triangular(x, x, upper=True),
    "householder_product": lambda x: torch.linalg.householder_product(x, x[..., 0]),
    "lstsq": lambda x: torch.linalg.lstsq(x, x).solution,
    "eigvals": torch.linalg.eigvals,
}


def _outcome(run, x):
    try:
        run(x)
    except Exception as error:
        return type(error)
    return None


@pytest.mark.parametrize("name", KERNELS)
def test_a_dtype_that_a_kernel_does_not_know_is_refused_as_on_the_cpu(name):
    dtypes = (torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64, torch.float32)
    for dtype in dtypes:
        want, got = (_outcome(KERNELS[name], _image(d, dtype)) for d in ("cpu", "jax"))
        assert got is want, dtype


@pytest.mark.parametrize("name", ("adaptive_avg_pool2d", "softmax", "silu", "layer_norm"))
def test_a_dtype_is_known_of_nothing_as_on_the_cpu(name):
    for dtype in (torch.int64, torch.bool, torch.complex64, torch.float32):
        want, got = (_outcome(KERNELS[name], _image(d, dtype)[:0]) for d in ("cpu", "jax"))
        assert got is want, dtype


SHAPES = {
    "a matrix pooled": lambda d: F.max_pool2d(torch.ones(3, 4, device=d), 2),
    "five axes pooled": lambda d: F.max_pool2d(torch.ones(1, 2, 3, 4, 5, device=d), 2),
    "no pixels": lambda d: F.adaptive_avg_pool2d(torch.ones(2, 3, 9, 0, device=d), 3),
    "no pixels of a row": lambda d: F.adaptive_avg_pool1d(torch.ones(2, 3, 0, device=d), 3),
    "no channels": lambda d: F.adaptive_avg_pool3d(torch.ones(2, 0, 9, 9, 9, device=d), 3),
    "samples weighed in another dtype": lambda d: F.embedding_bag(
        torch.zeros(2, 2, dtype=torch.int64, device=d),
        torch.ones(3, 4, device=d),
        mode="sum",
        per_sample_weights=torch.ones(2, 2, dtype=torch.float64, device=d),
    ),
    "channels in no groups": lambda d: F.channel_shuffle(torch.ones(1, 4, 3, 3, device=d), 3),
    "no channels to resize": lambda d: F.interpolate(
        torch.ones(1, 0, 4, 4, device=d), scale_factor=2, mode="bicubic"
    ),
    "celu of no slope": lambda d: F.celu(torch.ones(3, device=d), 0.0),
    "strides of nothing": lambda d: F.conv1d(
        torch.ones(1, 3, 5, device=d), torch.ones(4, 3, 2, device=d), stride=0
    ),
    "channels of a transposed convolution": lambda d: F.conv_transpose2d(
        torch.ones(1, 2, 5, 5, device=d), torch.ones(3, 4, 2, 2, device=d)
    ),
    "too much output padding": lambda d: F.conv_transpose2d(
        torch.ones(1, 3, 5, 5, device=d), torch.ones(3, 4, 2, 2, device=d), output_padding=1
    ),
    "samples of fewer images": lambda d: torch.nn.FractionalMaxPool3d(
        2, output_size=1, _random_samples=torch.rand(0, 2, 3, device=d)
    )(torch.ones(1, 2, 4, 4, 4, device=d)),
    "weights of another dtype": lambda d: torch.nn.NLLLoss(
        weight=torch.ones(0, dtype=torch.float16, device=d)
    )(torch.ones(0, 0, device=d), torch.ones(0, dtype=torch.int64, device=d)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_that_a_kernel_does_not_take_is_refused(name):
    with pytest.raises(RuntimeError) as want:
        SHAPES[name]("cpu")
    with pytest.raises(want.type):
        SHAPES[name]("jax")


@pytest.mark.parametrize("rank", (2, 3))
def test_adaptive_maxima_of_no_images(rank):
    x = torch.ones(0, 4, *[9] * rank, device="jax", requires_grad=True)
    pool = getattr(F, f"adaptive_max_pool{rank}d")
    values, places = pool(x, 3, return_indices=True)
    assert values.shape == places.shape == (0, 4, *[3] * rank)
    values.sum().backward()
    assert x.grad.shape == x.shape
