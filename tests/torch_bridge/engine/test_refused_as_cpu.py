"""What the CPU's kernels refuse is refused at the call, with an error of the same type."""

import pytest
import torch

import isoshard.torch_bridge as xs  # noqa: F401
from tests.torch_bridge.older_torch import LDEXP

F = torch.nn.functional
S = torch.special


def ones(device, *size, dtype=torch.float32):
    return torch.ones(size, dtype=dtype, device=device)


def c64(device, *size):
    return ones(device, *size, dtype=torch.complex64)


def long(device, *size):
    return ones(device, *size, dtype=torch.int64)


def zeros(device, *size):
    return torch.zeros(size, dtype=torch.int64, device=device)


def mask(device, *size):
    return ones(device, *size, dtype=torch.bool)


ONE = ("airy_ai", "bessel_j0", "bessel_j1", "bessel_y0", "bessel_y1", "erfcx", "entr", "i0e")
ONE += ("i1", "i1e", "log_ndtr", "ndtri", "gammaln", "modified_bessel_i0", "modified_bessel_i1")
ONE += ("modified_bessel_k0", "modified_bessel_k1", "scaled_modified_bessel_k0")
ONE += ("scaled_modified_bessel_k1", "spherical_bessel_j0")
KINDS = [f"chebyshev_polynomial_{kind}" for kind in "tuvw"]
TWO = (*KINDS, *(f"shifted_{kind}" for kind in KINDS), "hermite_polynomial_h")
TWO += ("hermite_polynomial_he", "laguerre_polynomial_l", "legendre_polynomial_p", "xlog1py")
TWO += ("gammainc", "gammaincc", "zeta")

CALLS = {
    "arange of bools": lambda d: torch.arange(3, dtype=torch.bool, device=d),
    "bools to the power of bools": lambda d: ones(d).bool() ** ones(d).bool(),
    "a bool to the power of bools": lambda d: True ** ones(d).bool(),
    **{f"{name} of complex numbers": lambda d, f=name: getattr(S, f)(c64(d, 2)) for name in ONE},
    **{f"{name} of complex": lambda d, f=name: getattr(S, f)(c64(d), ones(d)) for name in TWO},
    **{f"{name} at complex": lambda d, f=name: getattr(S, f)(ones(d), c64(d)) for name in TWO},
    "polygamma of complex numbers": lambda d: torch.polygamma(1, c64(d, 2)),
    "digammas of complex numbers": lambda d: torch.polygamma(0, c64(d, 2)),
    "polygamma in place": lambda d: c64(d, 2).polygamma_(1),
    "hashes of complex numbers": lambda d: torch.hash_tensor(c64(d, 2)),
    "mvlgamma of order 0": lambda d: torch.mvlgamma(ones(d, 2) + 5, 0),
    "mvlgamma of order 0, in place": lambda d: (ones(d, 2) + 5).mvlgamma_(0),
    "mvlgamma of bools": lambda d: torch.mvlgamma(mask(d, 2), 1),
    "decimals of integers": lambda d: torch.round(long(d, 2), decimals=1),
    "no decimals of integers": lambda d: torch.round(long(d, 2), decimals=0),
    "logit in place, of integers": lambda d: long(d, 2).logit_(),
    "clamp of bools": lambda d: mask(d, 2).clamp(mask(d, 2), mask(d, 2)),
    "clamp of bools, in place": lambda d: mask(d, 2).clamp_(mask(d, 2), mask(d, 2)),
    "addcdiv of bools": lambda d: mask(d, 2).addcdiv(mask(d, 2), mask(d, 2)),
    "addcdiv of bools to floats": lambda d: ones(d, 2).addcdiv(mask(d, 2), mask(d, 2)),
    "ldexp by bools": lambda d: torch.ldexp(ones(d, 2), mask(d, 2)),
    "ldexp of bools, in place": lambda d: mask(d, 2).ldexp_(long(d, 2)),
    "cumsum as bools": lambda d: ones(d, 2).cumsum(0, dtype=torch.bool),
    "cumprod as bools": lambda d: ones(d, 2).cumprod(0, dtype=torch.bool),
    "k-th of no bools": lambda d: mask(d, 0, 2).kthvalue(1, 1),
    "from complex numbers": lambda d: torch.linspace(
        c64(d), ones(d), 3, dtype=torch.float32, device=d
    ),
    "to complex numbers": lambda d: torch.logspace(
        ones(d), c64(d), 3, dtype=torch.float32, device=d
    ),
    "cross of two dtypes": lambda d: torch.linalg.cross(long(d, 2, 3), ones(d, 2, 3)),
    "cross of two dtypes, the other way": lambda d: torch.cross(ones(d, 2, 3), c64(d, 2, 3), dim=1),
    "normal of integers": lambda d: torch.normal(long(d, 2), ones(d, 2)),
    "normal of complex spread": lambda d: torch.normal(ones(d, 2), c64(d, 2)),
    "normal of spread": lambda d: torch.normal(0.0, long(d, 2)),
    "normal of bools": lambda d: torch.normal(mask(d, 2), 1.0),
    "eigenvalues of integers": lambda d: torch.linalg.eigh(long(d, 2, 2)),
    "eigenvalues of halves": lambda d: torch.linalg.eigvalsh(ones(d, 2, 2, dtype=torch.float16)),
    "ormqr of no factors": lambda d: torch.ormqr(ones(d, 4, 3), ones(d, 0), ones(d, 4, 4)),
    "addmv of no rows": lambda d: torch.addmv(ones(d, 5), ones(d, 0, 10), ones(d, 10)),
    "addmv of no rows, in place": lambda d: ones(d, 1).addmv_(ones(d, 0, 10), ones(d, 10)),
    "addmm of no bools": lambda d: torch.addmm(mask(d, 0, 2), mask(d, 2, 5), mask(d, 5, 2)),
    "quantile of no such axis": lambda d: torch.quantile(ones(d, 5), 0.5, dim=99),
    "nanquantile of no such axis": lambda d: torch.nanquantile(ones(d, 5), 0.5, dim=-99),
    "bins of no number": lambda d: torch.histogram(ones(d, 5), 0),
    "bins of integers": lambda d: torch.histogram(ones(d, 5), long(d, 5)),
    "bins of no number, along axes": lambda d: torch.histogramdd(ones(d, 5, 2), [0, 2]),
    "bins along one axis": lambda d: torch.histogramdd(ones(d, 2), [2, 2]),
    "counts of integers": lambda d: torch.histogramdd(long(d, 5, 2), [2, 2]),
    "counts of no bools": lambda d: torch.histogramdd(mask(d, 0, 2), [2, 2]),
    "select_scatter of no axis": lambda d: torch.select_scatter(ones(d, 3, 3), ones(d, 3), 9, 0),
    "select_scatter of a number": lambda d: torch.select_scatter(ones(d, 3, 3), ones(d), 0, 0),
    "select_scatter of two dtypes": lambda d: torch.select_scatter(ones(d, 3, 3), long(d, 3), 0, 9),
    "slice_scatter of no axis": lambda d: torch.slice_scatter(ones(d, 3, 3), ones(d, 3, 3), -9),
    "slice_scatter of a row": lambda d: torch.slice_scatter(ones(d, 3, 3), ones(d, 3)),
    "slice_scatter of too much": lambda d: torch.slice_scatter(
        ones(d, 3, 3), ones(d, 3, 3), 0, 1, 3
    ),
    "slice_scatter with no step": lambda d: torch.slice_scatter(
        ones(d, 3, 3), ones(d, 3, 3), 0, 0, 3, 0
    ),
    "diagonal_scatter of a matrix": lambda d: torch.diagonal_scatter(ones(d, 3, 3), ones(d, 3, 3)),
    "diagonal_scatter of one axis": lambda d: torch.diagonal_scatter(
        ones(d, 3, 3), ones(d, 3), 0, 1, 1
    ),
    "diagonal_scatter of no such axis": lambda d: torch.diagonal_scatter(
        ones(d, 3, 3), ones(d, 3), 0, 1, 5
    ),
    "steps of nothing": lambda d: torch.as_strided_scatter(ones(d, 9), ones(d, 2), (2,), (0,)),
    "strided values of another shape": lambda d: torch.as_strided_scatter(
        ones(d, 9), ones(d, 3), (2, 2), (2, 1)
    ),
    "index_fill of nothing": lambda d: ones(d, 0, 3).index_fill(0, zeros(d, 2), 1.0),
    "index_fill with a complex tensor": lambda d: ones(d, 3).index_fill(0, zeros(d, 1), c64(d)),
    "index_reduce of bools": lambda d: mask(d, 3).index_reduce(0, zeros(d, 2), mask(d, 2), "amax"),
    "index_reduce of complex numbers": lambda d: c64(d, 3).index_reduce(
        0, zeros(d, 2), c64(d, 2), "mean"
    ),
    "index_reduce of complex products": lambda d: c64(d, 3).index_reduce(
        0, zeros(d, 2), c64(d, 2), "prod"
    ),
    "index_reduce of no such axis": lambda d: ones(d, 3).index_reduce(
        9, zeros(d, 2), ones(d, 2), "amax"
    ),
    "index_reduce of two dtypes": lambda d: ones(d, 3).index_reduce(
        0, zeros(d, 2), long(d, 2), "amin"
    ),
    "index_reduce of many places": lambda d: ones(d, 3).index_reduce_(
        0, zeros(d, 2), ones(d, 3), "amin"
    ),
    "index_reduce by floats": lambda d: ones(d, 3).index_reduce(0, ones(d, 2), ones(d, 2), "amin"),
    "index_reduce of nothing": lambda d: ones(d, 0, 2).index_reduce(
        0, zeros(d, 2), ones(d, 2, 2), "amax"
    ),
    "complex random numbers": lambda d: torch.randint(3, (2,), dtype=torch.complex64, device=d),
    "complex random numbers like others": lambda d: torch.randint_like(c64(d, 2), 3),
    "complex random numbers in place": lambda d: c64(d, 2).random_(),
    "masked and accumulated": lambda d: torch.ops.aten._unsafe_masked_index_put_accumulate(
        long(d, 3), mask(d, 2), [zeros(d, 2)], ones(d, 2)
    ),
    "masked by bytes": lambda d: torch.ops.aten._unsafe_masked_index(
        ones(d, 3, dtype=torch.uint8), mask(d, 2), [zeros(d, 2)], 999
    ),
    "softmax's gradient": lambda d: torch.ops.aten._softmax_backward_data(
        ones(d, 3), ones(d, 2, 3), 1, torch.float32
    ),
    "softmax's gradient of integers": lambda d: torch.ops.aten._softmax_backward_data(
        ones(d, 3), long(d, 3), 0, torch.float32
    ),
    "log_softmax's gradient of integers": lambda d: torch.ops.aten._log_softmax_backward_data(
        ones(d, 3), long(d, 3), 0, torch.float32
    ),
    "safe softmax of bools": lambda d: torch.ops.aten._safe_softmax(mask(d, 3), 0),
    "safe softmax of integers": lambda d: torch.ops.aten._safe_softmax(long(d, 3), 0),
    "max_pool's gradient of integers": lambda d: torch.ops.aten.max_pool2d_with_indices_backward(
        long(d, 1, 2, 2),
        long(d, 1, 4, 4),
        [2, 2],
        [2, 2],
        [0, 0],
        [1, 1],
        False,
        zeros(d, 1, 2, 2),
    ),
    "adaptive pooling of integers": lambda d: F.adaptive_avg_pool3d(long(d, 1, 2, 2, 2), 1),
    "adaptive pooling of no integers": lambda d: F.adaptive_avg_pool3d(long(d, 0, 1, 2, 2, 2), 2),
    "groups with integer weights": lambda d: F.group_norm(ones(d, 2, 4), 2, long(d, 4), ones(d, 4)),
    "groups with a bool bias": lambda d: F.group_norm(ones(d, 2, 4), 2, ones(d, 4), mask(d, 4)),
    "layers with an integer bias": lambda d: F.layer_norm(ones(d, 4), [4], ones(d, 4), long(d, 4)),
    "layers with bool weights": lambda d: F.layer_norm(ones(d, 2, 4), [4], mask(d, 4)),
    "batches with an integer mean": lambda d: F.batch_norm(ones(d, 2, 4), long(d, 4), ones(d, 4)),
    "batches with a bool variance": lambda d: F.batch_norm(ones(d, 2, 4), ones(d, 4), mask(d, 4)),
    "batches with integer weights": lambda d: F.batch_norm(
        ones(d, 2, 4), ones(d, 4), ones(d, 4), long(d, 4)
    ),
    "instances with a complex variance": lambda d: F.instance_norm(
        ones(d, 2, 4, 3), ones(d, 4), c64(d, 4)
    ),
    "instances with complex weights": lambda d: F.instance_norm(
        ones(d, 2, 4, 3), ones(d, 4), ones(d, 4), c64(d, 4)
    ),
    "bilinear of bools": lambda d: F.bilinear(mask(d, 2, 3), mask(d, 2, 4), mask(d, 5, 3, 4)),
    "cross entropy with integers": lambda d: F.binary_cross_entropy(ones(d, 2), long(d, 2)),
    "cross entropy with bools": lambda d: F.binary_cross_entropy(ones(d, 2), mask(d, 2)),
    "convolution of dilated integers": lambda d: F.conv2d(
        long(d, 1, 1, 5, 5).int(), long(d, 1, 1, 2, 2).int(), dilation=2
    ),
    "convolution with other weights": lambda d: F.conv3d(
        long(d, 1, 1, 5, 5, 5), ones(d, 1, 1, 2, 2, 2)
    ),
    "convolution with no weights": lambda d: F.conv1d(ones(d, 2, 3, 4), ones(d, 0, 3, 3)),
    "convolution with weights of more axes": lambda d: F.conv1d(
        ones(d, 2, 3, 4), ones(d, 3, 3, 3, 2)
    ),
    "strides for other axes": lambda d: F.conv2d(
        ones(d, 1, 3, 5, 5), ones(d, 3, 3, 3, 3, 2), stride=(2, 2)
    ),
    "transposed convolution, its bias": lambda d: F.conv_transpose1d(
        ones(d, 1, 3, 4), ones(d, 3, 3, 3), ones(d)
    ),
    "transposed convolution, a complex bias": lambda d: F.conv_transpose2d(
        ones(d, 1, 3, 4, 4), ones(d, 3, 3, 3, 3), c64(d, 3)
    ),
    "transposed convolution of volumes, an integer bias": lambda d: F.conv_transpose3d(
        ones(d, 1, 3, 4, 4, 4), ones(d, 3, 3, 3, 3, 3), long(d, 3)
    ),
    "connectionist frames of a half": lambda d: F.ctc_loss(
        ones(d, 5, 2, 4), long(d, 2, 3), ones(d, 2), long(d, 2)
    ),
    "connectionist frames of less than none": lambda d: F.ctc_loss(
        ones(d, 5, 2, 4), long(d, 2, 3), (-5, 5), (2, 2)
    ),
    "connectionist targets with an axis more": lambda d: F.ctc_loss(
        ones(d, 5, 2, 4), long(d, 2, 3, 2), (5, 5), (2, 2)
    ),
    "connectionist targets, too few": lambda d: F.ctc_loss(
        ones(d, 5, 2, 4), long(d, 3), (5, 5), (2, 2)
    ),
    "connectionist targets, too short": lambda d: F.ctc_loss(
        ones(d, 5, 2, 4), long(d, 2, 1), (5, 5), (2, 2)
    ),
    "grid of integers": lambda d: F.grid_sample(
        ones(d, 1, 1, 3, 3), long(d, 1, 2, 2, 2), align_corners=False
    ),
    "grid of bools": lambda d: F.grid_sample(
        ones(d, 1, 1, 3, 3, 3), mask(d, 1, 2, 2, 2, 3), align_corners=False
    ),
    "huber loss of complex targets": lambda d: F.huber_loss(ones(d, 2), c64(d, 2)),
    "mean squares of complex targets": lambda d: F.mse_loss(ones(d, 2), c64(d, 2)),
    "smooth loss of complex targets": lambda d: F.smooth_l1_loss(ones(d, 2), c64(d, 2)),
    "soft margins of bool scores": lambda d: F.soft_margin_loss(mask(d, 2), ones(d, 2)),
    "soft margins of more targets": lambda d: F.soft_margin_loss(ones(d), ones(d, 3)),
    **{
        f"{mode} pixels of nothing": lambda d, mode=mode, axes=axes: F.interpolate(
            ones(d, 1, 2, *[4] * axes), [0, 3, 3][:axes], mode=mode
        )
        for mode, axes in (
            ("bicubic", 2),
            ("linear", 1),
            ("trilinear", 3),
            ("bilinear", 2),
            ("nearest", 2),
            ("nearest-exact", 1),
        )
    },
    "pixel_unshuffle by too much": lambda d: F.pixel_unshuffle(ones(d, 1, 1, 1), 99),
    "pixel_unshuffle by too much of nothing": lambda d: F.pixel_unshuffle(ones(d, 0, 1, 1, 1), 99),
    "channels_last of a matrix": lambda d: ones(d, 3, 4).to(memory_format=torch.channels_last),
    "channels_last of volumes": lambda d: ones(d, 1, 2, 3, 4, 5).to(
        memory_format=torch.channels_last
    ),
    "channels_last_3d of images": lambda d: ones(d, 2, 3, 4, 5).to(
        memory_format=torch.channels_last_3d
    ),
    "channels_last of a matrix, another dtype": lambda d: ones(d, 3, 4).to(
        torch.float64, memory_format=torch.channels_last
    ),
    "channels_last of a copy": lambda d: ones(d, 3, 4).clone(memory_format=torch.channels_last),
    "channels_last of zeros": lambda d: torch.zeros_like(
        ones(d, 3, 4), memory_format=torch.channels_last
    ),
    "distance of bools": lambda d: torch.dist(mask(d, 2), mask(d, 2)),
    "buckets with a sorter of integers": lambda d: torch.searchsorted(
        ones(d, 3), ones(d, 2), sorter=long(d, 3).int()
    ),
    "buckets with a sorter of another shape": lambda d: torch.searchsorted(
        ones(d, 3), ones(d, 2), sorter=zeros(d, 2)
    ),
    "values at more places": lambda d: ones(d, 5).index_put((zeros(d, 2),), ones(d, 5)),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=LDEXP) if n == "ldexp by bools" else n for n in CALLS]
)
def test_it_is_refused_with_the_cpus_error(name):
    with pytest.raises((RuntimeError, IndexError, TypeError, ValueError)) as cpu:
        CALLS[name]("cpu")
    with pytest.raises(cpu.type) as ours:
        CALLS[name]("jax")
    assert ours.type is cpu.type


COMPUTED = {
    "quotients of integers and floats": lambda d: ones(d, 2).addcdiv(long(d, 2), ones(d, 2)),
    "products with bools": lambda d: mask(d, 2).addcmul(mask(d, 2), ones(d, 2)),
    "mean squares of integers and floats": lambda d: F.mse_loss(long(d, 2), ones(d, 2) / 4),
    "smooth loss of integers": lambda d: F.smooth_l1_loss(ones(d, 2) / 4, long(d, 2)),
    "extremes of complex numbers at no places": lambda d: c64(d, 3).scatter_reduce(
        0, zeros(d, 0), c64(d, 2), "amax"
    ),
    "float32 statistics of halves": lambda d: F.batch_norm(
        ones(d, 2, 4, dtype=torch.bfloat16), ones(d, 4), ones(d, 4), ones(d, 4), ones(d, 4)
    ),
    "bools bounded on one side": lambda d: mask(d, 2).clamp(min=mask(d, 2)),
    "targets that broadcast": lambda d: F.soft_margin_loss(ones(d, 3), ones(d)),
    "values of another dtype": lambda d: torch.select_scatter(ones(d, 3, 3), long(d, 3), 0, 1),
    "an own dtype of a softmax": lambda d: torch.ops.aten._safe_softmax(
        long(d, 3), 0, torch.float32
    ),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_what_the_cpu_takes_is_computed(name):
    want, got = COMPUTED[name]("cpu"), COMPUTED[name]("jax").cpu()
    torch.testing.assert_close(got, want)


def test_an_expanded_tensor_may_be_copied_to_itself():
    wide = torch.arange(2.0).reshape(1, 2).to("jax").expand(2, 2)
    assert wide.copy_(wide) is wide
    assert wide.tolist() == [[0.0, 1.0], [0.0, 1.0]]
    with pytest.raises(RuntimeError, match="expanded tensor"):
        wide.copy_(wide + 1)
