"""What torch's kernels reject in the arguments of layers and factorizations.

Torch's shape functions let this pass. The kernels relate sizes by arithmetic, read beyond tensors
of wrong sizes, or depend on elements, so they are not run on small calls as in `cpu_validation`.

>>> x = torch.zeros(1, 2, 2, dtype=torch.int32, device="meta")
>>> check_dtype("avg_pool2d", {"self": x})
Traceback (most recent call last):
...
NotImplementedError: "avg_pool2d" not implemented for 'Int'
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from isoshard.torch_bridge._torch_internals.tensor_fields import current_node

from .shape_checks import first_tensor, is_integral, spelled, tensors_of

Arguments = dict[str, Any]

_BOOL = frozenset({torch.bool})
_COMPLEX = frozenset({torch.complex32, torch.complex64, torch.complex128})
_HALVES = frozenset({torch.float16, torch.bfloat16})
_SHORT = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32})
_INTEGERS = _SHORT | {torch.int64}
_INTEGRAL = _INTEGERS | _BOOL

_UNSUPPORTED: dict[str, frozenset[torch.dtype]] = {
    **dict.fromkeys(("avg_pool2d", "avg_pool3d"), _SHORT | _BOOL | _COMPLEX),
    **dict.fromkeys(("max_pool2d_with_indices", "max_pool3d_with_indices"), _BOOL | _COMPLEX),
    **dict.fromkeys(("fractional_max_pool2d", "fractional_max_pool3d"), _COMPLEX),
    **dict.fromkeys(("max_unpool2d", "max_unpool3d"), _INTEGRAL | _COMPLEX),
    **dict.fromkeys(
        ("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward"),
        _INTEGRAL | _COMPLEX,
    ),
    "im2col": _INTEGERS,
    **dict.fromkeys(("native_batch_norm", "native_batch_norm_legit"), _INTEGRAL | _COMPLEX),
    **dict.fromkeys(("batch_norm_with_update", "batch_norm_no_update"), _INTEGRAL | _COMPLEX),
    **dict.fromkeys(("native_group_norm", "ctc_loss", "segment_reduce"), _INTEGRAL | _COMPLEX),
    "histc": _BOOL | _COMPLEX,  # GPUs count integers, and models rely on it
    **dict.fromkeys([f"reflection_pad{n}d" for n in (1, 2, 3)], _BOOL),
    **dict.fromkeys([f"replication_pad{n}d" for n in (1, 2, 3)], _BOOL),
    **dict.fromkeys(("cholesky", "cholesky_inverse", "cholesky_solve"), _INTEGRAL | _HALVES),
    **dict.fromkeys(("geqrf", "ormqr", "triangular_solve"), _INTEGRAL | _HALVES),
    **dict.fromkeys(("linalg_lu", "linalg_lu_factor_ex"), _INTEGRAL | _HALVES),
    **dict.fromkeys(("linalg_householder_product", "linalg_solve_triangular"), _INTEGRAL | _HALVES),
    **dict.fromkeys(("linalg_lstsq", "linalg_eigh"), _INTEGRAL | _HALVES),
    **dict.fromkeys(("linalg_eig", "linalg_eigvals"), _INTEGRAL | _HALVES),
    **dict.fromkeys(("linalg_cholesky_ex", "linalg_qr", "linalg_lu_solve"), _HALVES),
    **dict.fromkeys(("linalg_ldl_factor_ex", "linalg_ldl_solve"), _HALVES),
    **dict.fromkeys(("linalg_svd", "linalg_det", "linalg_solve_ex"), _HALVES),
}
"""The dtypes of its first tensor that an operator rejects, by its name without underscores.

16-bit floats are rejected only where no device of torch's takes them.
"""

_TAKES_EMPTY = frozenset(
    {"convolution", "max_unpool2d", "max_unpool3d", "linalg_svd", "linalg_det", "linalg_eigh"}
)
"""Operators whose kernel does not look at the dtype of a tensor without elements."""


def check_dtype(name: str, named: Arguments) -> None:
    """Reject a dtype of the first tensor that the kernel of an operator does not support."""
    if name in _TAKES_EMPTY and not all(tensor.numel() for tensor in tensors_of(named)):
        return
    dtype = first_tensor(named).dtype
    if name == "convolution":
        dilated = any(step > 1 for step in named["dilation"])
        unsupported = _SHORT | _BOOL if named["transposed"] or dilated else _BOOL
    else:
        unsupported = _UNSUPPORTED.get(name, frozenset())
    if dtype in unsupported:
        raise NotImplementedError(f"\"{name}\" not implemented for '{spelled(dtype)}'")


def check_same_dtype(name: str, named: Arguments) -> None:
    """Reject tensors of more than one dtype."""
    dtypes = {tensor.dtype for tensor in tensors_of(named)}
    # torch.func's autocast reaches only the operators themselves, so their gradients mix dtypes.
    in_backward = current_node() is not None
    if len(dtypes) > 1 and not in_backward:
        raise RuntimeError(
            f"{name}: expected all tensors to have the same dtype, but got "
            f"{' and '.join(sorted(map(str, dtypes)))}"
        )


def check_norm_parameters(name: str, named: Arguments) -> None:
    """Reject weights and statistics that have neither the dtype of the input nor float32."""
    dtype = named["input"].dtype
    if "batch" in name and not named["input"].numel():
        return
    allowed = {dtype, torch.float32} if dtype.itemsize == 2 else {dtype}
    for argument, value in named.items():
        if isinstance(value, torch.Tensor) and value.dtype not in allowed:
            raise RuntimeError(
                f"{name}: mixed dtype: expect {argument} to have scalar type {spelled(dtype)} as "
                f"the input has, but found {spelled(value.dtype)}"
            )


def check_image(name: str, named: Arguments) -> None:
    """Reject what is no image to pool, before its missing axes are read."""
    shape = list(named["self"].shape)
    if len(shape) not in (3, 4):
        raise RuntimeError(
            f"{name}(): non-empty 3D or 4D (batch mode) tensor expected for input, but got {shape}"
        )


def check_convolution(name: str, named: Arguments) -> None:
    """Reject weights, strides and a bias that do not go with an image, by shape or dtype."""
    stride, image, weight = named["stride"], named["input"], named["weight"]
    if any(step <= 0 for step in stride):
        raise RuntimeError(f"{name}: non-positive stride is not supported, got {list(stride)}")
    rank, groups = weight.dim(), named["groups"]
    if image.dim() != rank:
        raise RuntimeError(
            f"Expected {rank}-dimensional input for {rank}-dimensional weight "
            f"{list(weight.shape)}, but got {image.dim()}-dimensional input of size "
            f"{list(image.shape)} instead"
        )
    for argument in ("stride", "padding", "dilation", "output_padding"):
        if argument in named and len(named[argument]) not in (1, rank - 2):
            raise RuntimeError(
                f"expected {argument} to be a single integer value or a list of {rank - 2} values "
                f"to match the convolution dimensions, but got {argument}={list(named[argument])}"
            )
    if weight.shape[0] < groups:
        raise RuntimeError(
            f"Given groups={groups}, expected weight to be at least {groups} at dimension 0, but "
            f"got weight of size {list(weight.shape)} instead"
        )
    _check_bias(named)
    if named["transposed"]:
        _check_transposed(named)
    _check_convolution_dtypes(name, named)


def _check_bias(named: Arguments) -> None:
    weight, bias = named["weight"], named["bias"]
    transposed = named["transposed"]
    channels = weight.shape[1] * named["groups"] if transposed else weight.shape[0]
    if bias is not None and list(bias.shape) != [channels]:
        raise RuntimeError(
            f"Given transposed={int(transposed)}, weight of size {list(weight.shape)}, expected "
            f"bias to be 1-dimensional with {channels} elements, but got bias of size "
            f"{list(bias.shape)} instead"
        )


def _check_transposed(named: Arguments) -> None:
    image, weight = named["input"], named["weight"]
    if image.shape[1] != weight.shape[0]:
        raise RuntimeError(
            f"Given transposed=1, weight of size {list(weight.shape)}, expected input"
            f"{list(image.shape)} to have {weight.shape[0]} channels, but got {image.shape[1]} "
            "channels instead"
        )
    padding, stride, dilation = named["output_padding"], named["stride"], named["dilation"]
    if any(p >= max(s, d) for p, s, d in zip(padding, stride, dilation, strict=False)):
        raise RuntimeError(
            "output padding must be smaller than either stride or dilation, but got output padding "
            f"{list(padding)}, stride {list(stride)}, dilation {list(dilation)}"
        )


def _check_convolution_dtypes(name: str, named: Arguments) -> None:
    image, weight, bias = named["input"], named["weight"], named["bias"]
    check_same_dtype(name, {"input": image, "weight": weight})
    if named["transposed"] and weight.dim() == 5:
        check_same_dtype(name, named)
    if bias is not None and named["transposed"] and not torch.can_cast(bias.dtype, image.dtype):
        raise RuntimeError(
            f"{name}: result type {spelled(bias.dtype)} can't be cast to the desired output type "
            f"{spelled(image.dtype)}"
        )


def check_ctc_targets(name: str, named: Arguments) -> None:
    """Reject targets that are not as many, or not as long, as their lengths declare."""
    shape, lengths = list(named["targets"].shape), named["target_lengths"]
    if len(shape) not in (1, 2):
        raise RuntimeError(
            f"{name}: Expected 1 to 2 dimensions, but got {len(shape)}-dimensional tensor for "
            "argument #2 'targets'"
        )
    static = isinstance(lengths, list | tuple)
    for argument in ("input_lengths", "target_lengths"):
        value = named[argument]
        if isinstance(value, torch.Tensor) and not is_integral(value.dtype):
            raise RuntimeError(f"{name}: {argument} must be integral, but got {value.dtype}")
        least = min(value, default=0) if isinstance(value, list | tuple) else 0
        if least < 0:
            raise RuntimeError(
                f"{name}: Expected {argument} to have value at least 0, but got value {least}"
            )
    if len(shape) == 1 and static and shape[0] != sum(lengths):
        raise RuntimeError(
            f"{name}: Expected tensor to have size {sum(lengths)} at dimension 0, but got size "
            f"{shape[0]} for argument #2 'targets'"
        )
    count = len(lengths) if static else lengths.numel()
    if len(shape) == 2 and shape[0] != count:
        raise RuntimeError(
            f"{name}: Expected tensor to have size {count} at dimension 0, but got size "
            f"{shape[0]} for argument #2 'targets'"
        )
    if len(shape) == 2 and static and shape[1] < max(lengths, default=0):
        raise RuntimeError(
            f"{name}: Expected tensor to have size at least {max(lengths)} at dimension 1, but got "
            f"size {shape[1]} for argument #2 'targets'"
        )


def check_reflections(name: str, named: Arguments) -> None:
    """Reject another number of reflections than a matrix product with them has."""
    matrix, factors, other = named["self"], named["input2"], named["input3"]
    if min(matrix.dim(), factors.dim() + 1, other.dim()) < 2:
        return
    count = min(other.shape[-2 if named["left"] else -1], matrix.shape[-1])
    if factors.shape[-1] != count:
        raise RuntimeError(
            f"torch.ormqr: tau.shape[-1] must be equal to {count}, but got {list(factors.shape)}"
        )


def check_random_samples(name: str, named: Arguments) -> None:
    """Reject random numbers of windows that are not three for each channel of each image."""
    shape, image = list(named["random_samples"].shape), named["self"]
    if len(shape) != 3:
        raise RuntimeError(f"Expect _random_samples to have 3 dimensions, got {len(shape)}")
    images = 1 if image.dim() == 4 else image.shape[0]
    if shape[0] < images or shape[1:] != [image.shape[-4], 3]:
        raise RuntimeError(
            f"{name}: Expect _random_samples of shape {[images, image.shape[-4], 3]}, got {shape}"
        )


_NORMS = ("native_batch_norm", "native_batch_norm_legit", "native_group_norm")
_NORMS += ("batch_norm_with_update", "native_batch_norm_legit_no_training")
CHECKS: dict[str, tuple[Callable[[str, Arguments], None], ...]] = {
    **dict.fromkeys(_UNSUPPORTED, ()),
    **dict.fromkeys(_NORMS, (check_norm_parameters,)),
    "convolution": (check_convolution,),
    "fractional_max_pool3d": (check_random_samples,),
    "max_pool2d_with_indices": (check_image,),
    "ctc_loss": (check_ctc_targets,),
    "ormqr": (check_reflections,),
}
CHECKS = {name: (*checks, check_dtype) for name, checks in CHECKS.items()}
"""The checks of an operator, by its name without underscores."""
