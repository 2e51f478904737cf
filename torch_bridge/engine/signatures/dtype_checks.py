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

from .kernel_checks import first_tensor, spelled, tensors_of

Arguments = dict[str, Any]

_BOOL = frozenset({torch.bool})
_COMPLEX = frozenset({torch.complex32, torch.complex64, torch.complex128})
_HALVES = frozenset({torch.float16, torch.bfloat16})
_SHORT = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32})
_INTEGERS = _SHORT | {torch.int64}
_WHOLE = _INTEGERS | _BOOL

_HISTOGRAMS = ("histogramdd_bin_edges", "histogramdd_from_bin_cts", "histogramdd_from_bin_tensors")
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
    "hash_tensor": _COMPLEX,
    "threshold": _BOOL | _COMPLEX,
    "hardtanh": _COMPLEX,
    **dict.fromkeys(("native_group_norm", "native_layer_norm"), _WHOLE | _COMPLEX),
    **dict.fromkeys(("native_batch_norm", "native_batch_norm_legit"), _WHOLE | _COMPLEX),
    **dict.fromkeys(("batch_norm_with_update", "batch_norm_no_update"), _WHOLE | _COMPLEX),
    **dict.fromkeys(("softmax", "log_softmax", "softmax_backward_data"), _WHOLE | _COMPLEX),
    "huber_loss": _WHOLE | _COMPLEX,
    "trilinear": _BOOL,
    **dict.fromkeys(
        ("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward"), _WHOLE | _COMPLEX
    ),
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
    **dict.fromkeys(_HISTOGRAMS, _WHOLE | _COMPLEX),
    "logcumsumexp": _WHOLE,
    **dict.fromkeys([f"reflection_pad{n}d" for n in (1, 2, 3)], _BOOL),
    **dict.fromkeys([f"replication_pad{n}d" for n in (1, 2, 3)], _BOOL),
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "vdot"), _BOOL),
    **dict.fromkeys(("addmm", "addmv", "addbmm", "baddbmm"), _BOOL),
    **dict.fromkeys(("linalg_cross", "trace"), _BOOL),
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
        *("softmax", "log_softmax", "trilinear", "hash_tensor", "index_reduce"),
        *("grid_sampler_2d", "grid_sampler_3d", "adaptive_avg_pool2d"),
        *("max_unpool2d", "max_unpool3d", "linalg_svd", "linalg_det"),
    }
)
"""Operators that are done before a kernel is asked for, where there is nothing to compute."""

_BY_ARGUMENT = ("addcmul", "convolution", "scatter_reduce", "index_reduce")


def rules_of(name: str) -> tuple[Callable[[str, Arguments], None], ...]:
    """The rules of dtypes for an operator; most have none.

    Args:
        name: the operator's, without namespace.
    """
    plain = name.strip("_")
    known = plain in _REFUSED or plain in _BY_ARGUMENT
    return (refuse_dtype,) if known else ()


def refuse_dtype(name: str, named: Arguments) -> None:
    """Refuse a dtype that the kernel of an operator does not know.

    Args:
        name: the operator's, without namespace and underscores at its ends.
        named: its arguments.

    Raises:
        NotImplementedError: the dtype of the first tensor is not known.
    """
    if name in _ALSO_OF_NOTHING and not all(tensor.numel() for tensor in tensors_of(named)):
        return
    dtype = first_tensor(named).dtype
    if dtype in _refused(name, named):
        raise NotImplementedError(f"\"{name}\" not implemented for '{spelled(dtype)}'")


def _refused(name: str, named: Arguments) -> frozenset[torch.dtype]:
    if name == "convolution":
        dilated = any(step > 1 for step in named["dilation"])
        return _SHORT | _BOOL if named["transposed"] or dilated else _BOOL
    if name == "addcmul":
        bools = all(tensor.dtype == torch.bool for tensor in tensors_of(named))
        return _BOOL if bools else frozenset()
    if name == "index_reduce" and named["self"].dim() < 2:
        return _BOOL | _COMPLEX
    if name in ("scatter_reduce", "index_reduce"):
        ordered = _COMPLEX if named["index"].numel() else frozenset()
        return {"mean": _BOOL, "amin": ordered, "amax": ordered}.get(named["reduce"], frozenset())
    return _REFUSED.get(name, frozenset())
