"""The dtypes that torch's kernels of neural networks and linear algebra do not know.

Torch's shape functions give a result for every dtype, so a call that its kernels refuse would be
computed. Float16 and bfloat16 are refused only where no device of torch's takes them.

>>> refuse_dtype("hardswish", {"self": torch.zeros(2, dtype=torch.int64, device="meta")})
Traceback (most recent call last):
...
NotImplementedError: "hardswish" not implemented for 'Long'
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .kernel_checks import spelled

Arguments = dict[str, Any]

_BOOL = frozenset({torch.bool})
_COMPLEX = frozenset({torch.complex32, torch.complex64, torch.complex128})
_HALVES = frozenset({torch.float16, torch.bfloat16})
_SHORT = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32})
_INTEGERS = _SHORT | {torch.int64}
_WHOLE = _INTEGERS | _BOOL

_REFUSED: dict[str, frozenset[torch.dtype]] = {
    **dict.fromkeys(("adaptive_avg_pool2d", "adaptive_avg_pool3d"), _WHOLE | _COMPLEX),
    **dict.fromkeys(("adaptive_max_pool2d", "adaptive_max_pool3d"), _WHOLE | _COMPLEX),
    **dict.fromkeys(("avg_pool2d", "avg_pool3d"), _SHORT | _BOOL | _COMPLEX),
    **dict.fromkeys(("max_pool2d_with_indices", "max_pool3d_with_indices"), _BOOL | _COMPLEX),
    **dict.fromkeys(("fractional_max_pool2d", "fractional_max_pool3d"), _COMPLEX),
    **dict.fromkeys(("max_unpool2d", "max_unpool3d"), _WHOLE | _COMPLEX),
    "im2col": _INTEGERS,
    **dict.fromkeys(
        ("hardswish", "hardsigmoid", "hardshrink", "softshrink", "softplus"), _WHOLE | _COMPLEX
    ),
    **dict.fromkeys(("elu", "gelu", "glu", "leaky_relu", "mish"), _WHOLE | _COMPLEX),
    **dict.fromkeys(("log_sigmoid_forward", "prelu_kernel", "rrelu_with_noise"), _WHOLE | _COMPLEX),
    "celu": _WHOLE | _COMPLEX,
    "silu": _WHOLE,
    "safe_softmax": _COMPLEX,
    "threshold": _BOOL | _COMPLEX,
    "hardtanh": _COMPLEX,
    **dict.fromkeys(("native_group_norm", "native_layer_norm"), _WHOLE | _COMPLEX),
    **dict.fromkeys(("native_batch_norm", "native_batch_norm_legit"), _WHOLE | _COMPLEX),
    **dict.fromkeys(("batch_norm_with_update", "batch_norm_no_update"), _WHOLE | _COMPLEX),
    **dict.fromkeys(("softmax", "log_softmax", "softmax_backward_data"), _WHOLE | _COMPLEX),
    **dict.fromkeys(("huber_loss", "smooth_l1_loss", "mse_loss"), _WHOLE | _COMPLEX),
    "binary_cross_entropy": _WHOLE | _COMPLEX,
    **dict.fromkeys(("binary_cross_entropy_with_logits", "ctc_loss"), _WHOLE | _COMPLEX),
    **dict.fromkeys(("upsample_linear1d", "upsample_trilinear3d"), frozenset({torch.uint8})),
    **dict.fromkeys(
        ("upsample_bilinear2d_aa", "upsample_bicubic2d_aa"),
        (_WHOLE | _COMPLEX) - {torch.uint8},
    ),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _WHOLE | _COMPLEX),
    **dict.fromkeys(("multi_margin_loss", "multilabel_margin_loss_forward"), _WHOLE | _COMPLEX),
    **dict.fromkeys(("grid_sampler_2d", "grid_sampler_3d"), _WHOLE | _COMPLEX),
    **dict.fromkeys(("histogram", "segment_reduce"), _WHOLE | _COMPLEX),
    "histc": _BOOL | _COMPLEX,  # GPUs count integers, which models ask them to
    **dict.fromkeys(("histogramdd_bin_edges", "histogramdd_from_bin_cts"), _WHOLE | _COMPLEX),
    "logcumsumexp": _WHOLE,
    **dict.fromkeys([f"reflection_pad{n}d" for n in (1, 2, 3)], _BOOL),
    **dict.fromkeys([f"replication_pad{n}d" for n in (1, 2, 3)], _BOOL),
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "vdot"), _BOOL),
    **dict.fromkeys(("addmm", "addmv", "addbmm", "baddbmm"), _BOOL),
    **dict.fromkeys(("addcmul", "linalg_cross", "trace"), _BOOL),
    "lerp": _WHOLE,
    "frac": _WHOLE | _COMPLEX,
    "round": _BOOL | _COMPLEX,
    **dict.fromkeys(("ceil", "floor", "trunc"), _BOOL),
    **dict.fromkeys(("digamma", "erf", "erfc", "erfinv", "i0", "lgamma", "logit"), _COMPLEX),
    **dict.fromkeys(("cholesky", "cholesky_inverse", "cholesky_solve"), _WHOLE | _HALVES),
    **dict.fromkeys(("geqrf", "ormqr", "triangular_solve"), _WHOLE | _HALVES),
    **dict.fromkeys(("linalg_lu", "linalg_lu_factor_ex"), _WHOLE | _HALVES),
    **dict.fromkeys(("linalg_householder_product", "linalg_solve_triangular"), _WHOLE | _HALVES),
    **dict.fromkeys(("linalg_cholesky_ex", "linalg_qr", "linalg_lu_solve"), _HALVES),
    **dict.fromkeys(("linalg_ldl_factor_ex", "linalg_ldl_solve", "linalg_eig"), _HALVES),
    **dict.fromkeys(("linalg_svd", "linalg_det", "linalg_solve_ex"), _HALVES),
}
"""The dtypes of its first tensor that an operator refuses.

By its name, without underscores at its ends.
"""

_ALSO_OF_NOTHING = frozenset(
    {
        *("mm", "bmm", "mv", "addmm", "addmv", "addbmm", "baddbmm", "convolution"),
        *("softmax", "log_softmax", "grid_sampler_2d", "grid_sampler_3d", "index_reduce"),
        *("adaptive_avg_pool2d", "adaptive_avg_pool3d", "max_unpool2d", "max_unpool3d"),
        *("linalg_svd", "linalg_det"),
    }
)
"""Operators that are done before a kernel is asked for, where there is nothing to compute."""

_BY_ARGUMENT = ("convolution", "scatter_reduce", "index_reduce")


def rules_of(name: str) -> tuple[Callable[[str, Arguments], None], ...]:
    """The rules of dtypes for an operator; most have none.

    Args:
        name: the operator's, without namespace.
    """
    plain = name.strip("_")
    known = plain in _REFUSED or plain in _BY_ARGUMENT
    return (*_MORE.get(plain, ()), *((refuse_dtype,) if known else ()))


def refuse_dtype(name: str, named: Arguments) -> None:
    """Refuse a dtype that the kernel of an operator does not know.

    Args:
        name: the operator's, without namespace and underscores at its ends.
        named: its arguments.

    Raises:
        NotImplementedError: the dtype of the first tensor is not known.
    """
    first = next((each for each in named.values() if isinstance(each, torch.Tensor)), None)
    if first is None or (name in _ALSO_OF_NOTHING and _of_nothing(named)):
        return
    if first.dtype in _refused(name, named):
        raise NotImplementedError(f"\"{name}\" not implemented for '{spelled(first.dtype)}'")


def _of_nothing(named: Arguments) -> bool:
    return any(isinstance(each, torch.Tensor) and not each.numel() for each in named.values())


def _refused(name: str, named: Arguments) -> frozenset[torch.dtype]:
    if name == "convolution":
        return _SHORT | _BOOL if named["transposed"] else _BOOL
    if name in ("scatter_reduce", "index_reduce"):
        return {"mean": _BOOL, "amin": _COMPLEX, "amax": _COMPLEX}.get(named["reduce"], frozenset())
    return _REFUSED.get(name, frozenset())


def weights_like_scores(name: str, named: Arguments) -> None:
    """Refuse weights of classes of another dtype than the scores, also of no scores."""
    scores, weight = named["self"], named["weight"]
    if weight is not None and weight.dtype != scores.dtype:
        raise RuntimeError(
            f"expected scalar type {spelled(scores.dtype)} but found {spelled(weight.dtype)}"
        )


def weights_like_rows(name: str, named: Arguments) -> None:
    """Refuse weights of samples of another dtype than the rows they are of."""
    rows, weights = named["weight"], named.get("per_sample_weights")
    if weights is not None and weights.dtype != rows.dtype:
        raise RuntimeError(
            f"{name}: expected 'weight' to have the same type as 'per_sample_weights', but got "
            f"{spelled(rows.dtype)} and {spelled(weights.dtype)}"
        )


def float_kernels(name: str, named: Arguments) -> None:
    """Refuse what is solved in float32 and float64 only."""
    dtype = named["self"].dtype
    if dtype in _WHOLE | _HALVES:
        raise RuntimeError(
            f"{name}: This function doesn't handle types other than float and double, got {dtype}"
        )


def floats_of_whole_numbers(name: str, named: Arguments) -> None:
    """Refuse whole numbers where the result is complex."""
    dtype = named["self"].dtype
    if dtype in _WHOLE:
        raise RuntimeError(f"{name}: {spelled(dtype)} has no complex dtype; give floats")


def margins(name: str, named: Arguments) -> None:
    """Refuse whole numbers in a loss that is a float."""
    dtype = named["self"].dtype
    if dtype in _INTEGERS:
        raise RuntimeError(
            f"{name}: result type Float can't be cast to the desired output type {spelled(dtype)}"
        )


def images_expected(name: str, named: Arguments) -> None:
    """Refuse what is no image to pool, before an axis that is not there is asked for."""
    shape = list(named["self"].shape)
    if len(shape) not in (3, 4):
        raise RuntimeError(
            f"{name}(): non-empty 3D or 4D (batch mode) tensor expected for input, but got {shape}"
        )


def pixels_expected(name: str, named: Arguments) -> None:
    """Refuse images with an axis to average over that has no place."""
    shape, volume = list(named["self"].shape), name.endswith("3d")
    axes = range(1, len(shape)) if volume else range(len(shape) - 2, len(shape))
    for axis in axes if len(shape) >= 3 else ():
        if not shape[axis]:
            raise RuntimeError(
                f"{name}(): Expected input to have non-zero size for non-batch dimensions, but "
                f"input has sizes {shape} with dimension {axis} being empty"
            )


def channels_in_groups(name: str, named: Arguments) -> None:
    """Refuse channels to shuffle that no groups of one size hold."""
    shape, groups = list(named["self"].shape), named["groups"]
    if len(shape) > 2 and groups > 0 and shape[1] % groups:
        raise RuntimeError(
            f"{name}: Number of channels must be divisible by groups. Got {shape[1]} channels and "
            f"{groups} groups."
        )


def channels_expected(name: str, named: Arguments) -> None:
    """Refuse images to resize that have no channels or no pixels."""
    shape = list(named["self"].shape)
    if len(shape) == 4 and 0 in shape[1:]:
        raise RuntimeError(f"{name}: Non-empty 4D data tensor expected but got sizes {shape}")


def samples_of_images(name: str, named: Arguments) -> None:
    """Refuse random numbers of windows that are not three for each channel of each image."""
    shape, image = list(named["random_samples"].shape), named["self"]
    if len(shape) != 3:
        raise RuntimeError(f"Expect _random_samples to have 3 dimensions, got {len(shape)}")
    images = 1 if image.dim() == 4 else image.shape[0]
    if shape[0] < images or shape[1:] != [image.shape[-4], 3]:
        raise RuntimeError(
            f"{name}: Expect _random_samples of shape {[images, image.shape[-4], 3]}, got {shape}"
        )


def slope_of_celu(name: str, named: Arguments) -> None:
    """Refuse to divide by an alpha of zero."""
    if named.get("alpha", 1.0) == 0:
        raise RuntimeError("ZeroDivisionError: alpha cannot be 0 for CELU")


def windows_fit(name: str, named: Arguments) -> None:
    """Refuse strides of nothing, and what a transposed convolution does not take."""
    stride, image, weight = named["stride"], named["input"], named["weight"]
    if any(step <= 0 for step in stride):
        raise RuntimeError(f"{name}: non-positive stride is not supported, got {list(stride)}")
    if not named["transposed"] or image.dim() != weight.dim():
        return
    if image.shape[1] != weight.shape[0]:
        raise RuntimeError(
            f"Given transposed=1, weight of size {list(weight.shape)}, expected input"
            f"{list(image.shape)} to have {weight.shape[0]} channels, but got {image.shape[1]} "
            "channels instead"
        )
    padding, dilation = named["output_padding"], named["dilation"]
    if any(p >= max(s, d) for p, s, d in zip(padding, stride, dilation, strict=False)):
        raise RuntimeError(
            "output padding must be smaller than either stride or dilation, but got output padding "
            f"{list(padding)}, stride {list(stride)}, dilation {list(dilation)}"
        )


_MORE: dict[str, tuple[Callable[[str, Arguments], None], ...]] = {
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), (weights_like_scores,)),
    **dict.fromkeys(("embedding_bag", "embedding_bag_forward_only"), (weights_like_rows,)),
    **dict.fromkeys(("adaptive_avg_pool2d", "adaptive_avg_pool3d"), (pixels_expected,)),
    **dict.fromkeys(("linalg_eig", "linalg_eigvals"), (floats_of_whole_numbers,)),
    "celu": (slope_of_celu,),
    "fractional_max_pool3d": (samples_of_images,),
    **dict.fromkeys(("channel_shuffle", "native_channel_shuffle"), (channels_in_groups,)),
    "convolution": (windows_fit,),
    "upsample_bicubic2d": (channels_expected,),
    "linalg_lstsq": (float_kernels,),
    "max_pool2d_with_indices": (images_expected,),
    "soft_margin_loss": (margins,),
}
