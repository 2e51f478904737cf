"""Validation of arguments by torch's CPU kernels.

Torch's shape functions, which run on `meta` tensors, let dtypes, shapes and numbers pass that its
kernels reject. So the CPU kernel itself is run on a small call of the same kind, once for each new
signature. Sizes are replaced by small ones in the same order, equal ones by equal ones: the kernels
listed here only compare sizes. If the small call raises, the error is that of the actual sizes.

>>> x = torch.zeros(9000, 7000, dtype=torch.int64, device="meta")
>>> validate(torch.ops.aten.var.correction, (x,), {})
Traceback (most recent call last):
...
RuntimeError: std and var only support floating point and complex dtypes
>>> validate(torch.ops.aten.topk.default, (x, 8000), {})
Traceback (most recent call last):
...
RuntimeError: selected index k out of range
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from isoshard.torch_bridge._torch_internals import OpOverload, schema_of
from isoshard.torch_bridge._torch_internals.tensor_fields import current_node
from isoshard.torch_bridge.engine.values.metas import map_leaves

from .shape_checks import SPELLED

_SMALL = 4
"""Sizes up to this one are kept: kernels may require 0, 1, 2, 3 or 4 elements along an axis."""

_MOST = 2**28
"""Elements at most of a call that is repeated in its actual sizes."""

_LAZY = 2**16
"""Elements from which on zeros are memory that the operating system has not given yet."""

_HALVES = re.compile(r"not implemented for '(Half|BFloat16)'")
_CPU_ALONE = re.compile("nansum on CPU|half to float conversion is not supported on CPU")
_INT32_TARGETS = ("nll_loss_forward", "nll_loss2d_forward")
"""Losses whose class indices may have 32 bits, as JAX's integers have in a `jax_function`.

Not only while JAX traces: a signature is validated once, whoever meets it first.
"""
_KERNEL_NAME = re.compile(r'^"\w+"(?= not implemented for)')


def validate(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise what the CPU kernel of `op` raises for a call on `meta` tensors."""
    name = plain_name(op)
    if name not in _VALIDATED:
        return
    tensors = _tensors((args, tuple(kwargs.values())))
    dtypes = {tensor.dtype for tensor in tensors}
    requested = {arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.dtype)}
    if not dtypes | requested <= SPELLED.keys():
        return  # float8, uint16, ..: CPUs compute less with them than other devices
    if len(dtypes) > 1 and current_node() is not None:
        return  # torch.func's autocast reaches no gradients of operators, so these mix dtypes
    error = kernel_error(op, args, kwargs)
    if error is not None:
        message = _KERNEL_NAME.sub(f'"{name}"', str(error))  # not the name of its loop in C++
        if message.endswith("without overflow"):
            message += f": {op}, {_number_arguments(op, args, kwargs)}"
        raise type(error)(message)


def _number_arguments(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    names = [argument.name for argument in schema_of(op).arguments]
    named = (*zip(names, args, strict=False), *kwargs.items())
    return ", ".join(f"{key}={arg}" for key, arg in named if type(arg) in (int, float, complex))


def plain_name(op: OpOverload) -> str:
    """The name of an operator without namespace, and without underscores around it."""
    return schema_of(op).name.removeprefix("aten::").strip("_")


def _tensors(value: Any) -> list[torch.Tensor]:
    leaves: list[Any] = []
    map_leaves(leaves.append, value)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _small_sizes(
    op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]
) -> dict[int, int]:
    sizes = {size for tensor in tensors for size in tensor.shape}
    names = [argument.name for argument in schema_of(op).arguments]
    for name, arg in (*zip(names, args, strict=False), *kwargs.items()):
        if name in _SIZES and not isinstance(arg, torch.Tensor):
            extents = arg if isinstance(arg, list | tuple) else (arg,)
            sizes |= {extent for extent in extents if type(extent) is int}
    large = sorted(size for size in sizes if size > _SMALL)
    return {size: _SMALL + rank for rank, size in enumerate(large, 1)}


def kernel_error(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception | None:
    """The error of the CPU kernel of `op` for tensors of these sizes and dtypes, on any device."""
    tensors = _tensors((args, tuple(kwargs.values())))
    small = _small_sizes(op, args, kwargs, tensors)
    error = _sized_error(op, args, kwargs, small)
    if error is not None and small and sum(tensor.numel() for tensor in tensors) <= _MOST:
        return _sized_error(op, args, kwargs, {})
    return error


def _sized_error(
    op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: dict[int, int]
) -> Exception | None:
    """The error with sizes replaced, and dtypes where only the CPU rejects them."""
    error = _run(op, args, kwargs, sizes, lambda dtype: dtype)
    if error is not None and _HALVES.search(str(error)):
        halves = (torch.float16, torch.bfloat16)
        return _run(op, args, kwargs, sizes, lambda d: torch.float32 if d in halves else d)
    if error is not None and plain_name(op) in _INT32_TARGETS:
        return _run(
            op, args, kwargs, sizes, lambda dtype: torch.int64 if dtype == torch.int32 else dtype
        )
    return error


def _run(
    op: OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    sizes: dict[int, int],
    cast: Callable[[torch.dtype], torch.dtype],
) -> Exception | None:
    """The error of the CPU kernel of `op`, with sizes and dtypes replaced; None without one."""

    def on_cpu(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            data = _zeros([sizes.get(size, size) for size in leaf.shape], cast(leaf.dtype))
            return data.fill_(1) if name in _DIVIDES else data
        return cast(leaf) if isinstance(leaf, torch.dtype) else leaf

    def resized(leaf: Any) -> Any:
        return sizes.get(leaf, leaf) if type(leaf) is int else on_cpu(leaf)

    def replaced(key: str, value: Any) -> Any:
        if key == "device":
            return torch.device("cpu")
        return map_leaves(resized if key in _SIZES else on_cpu, value)

    name = plain_name(op)
    names = [argument.name for argument in schema_of(op).arguments]
    named = {key: replaced(key, value) for key, value in zip(names, args, strict=False)}
    named |= {key: replaced(key, value) for key, value in kwargs.items()}
    if "generator" in names:  # the default one keeps its state
        named["generator"] = torch.Generator()
    try:
        op(**named)
    except NotImplementedError as error:
        return None if "Could not run" in str(error) else error  # there is no kernel for CPUs
    except Exception as error:
        return None if _CPU_ALONE.search(str(error)) else error
    return None


def _zeros(shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Zeros on the CPU; large ones take no memory until a kernel reads them."""
    count = math.prod(shape)
    if count < _LAZY:
        return torch.zeros(shape, dtype=dtype, device="cpu")
    data = torch.from_numpy(np.zeros(count * dtype.itemsize, np.uint8))
    return data.view(dtype).view(shape)


_SIZES = frozenset(
    {
        *("k", "bins", "steps", "size", "output_size", "normalized_shape", "num_samples"),
        *("N", "C", "HxW", "group", "groups"),
    }
)
"""Arguments that are sizes, or compared with sizes."""

_DIVIDES = frozenset({"div", "floor_divide", "remainder", "fmod"})
"""Operators whose kernels reject zeros, so are run on ones."""

_VALIDATED = frozenset(
    """
    var std var_mean std_mean nansum sum all any count_nonzero mean logsumexp norm
    linalg_vector_norm amax amin argmax argmin max min aminmax mode median nanmedian topk kthvalue
    argsort msort sort searchsorted bucketize cummax cummin cumsum cumprod logcumsumexp hash_tensor
    trace histogram histogramdd_bin_edges histogramdd_from_bin_cts histogramdd_from_bin_tensors
    floor ceil trunc round frac sign signbit clamp clamp_min clamp_max relu maximum minimum fmax
    fmin atan2 hypot copysign nextafter xlogy heaviside lt le gt ge where complex polar add sub rsub
    floor_divide div remainder fmod pow addcmul addcdiv lerp ldexp logaddexp logaddexp2 gcd lcm
    bitwise_and bitwise_or bitwise_xor bitwise_not bitwise_left_shift bitwise_right_shift lshift
    rshift ilshift irshift digamma erf erfc erfinv i0 lgamma logit igamma igammac polygamma mvlgamma
    fill full full_like new_full linspace logspace constant_pad_nd
    masked_fill masked_scatter index_fill index_add index_reduce index_copy index_select gather take
    put scatter scatter_add scatter_reduce cat unsafe_masked_index
    unsafe_masked_index_put_accumulate
    random normal normal_functional exponential cauchy log_normal uniform bernoulli
    mm bmm mv dot vdot addmm addmv addbmm baddbmm trilinear linalg_cross
    hardswish hardsigmoid hardshrink softshrink softplus elu gelu glu leaky_relu mish silu celu
    log_sigmoid_forward prelu_kernel rrelu_with_noise threshold hardtanh softmax log_softmax
    safe_softmax softmax_backward_data log_softmax_backward_data native_layer_norm
    mse_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy
    binary_cross_entropy_with_logits nll_loss_forward nll_loss2d_forward multi_margin_loss
    multilabel_margin_loss_forward embedding_bag embedding_bag_forward_only
    adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d
    grid_sampler_2d grid_sampler_3d channel_shuffle
    native_channel_shuffle pixel_unshuffle
    upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d
    upsample_bilinear2d_aa upsample_bicubic2d_aa upsample_nearest1d upsample_nearest2d
    upsample_nearest3d upsample_nearest_exact1d upsample_nearest_exact2d upsample_nearest_exact3d
    special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1
    special_spherical_bessel_j0 special_modified_bessel_i0 special_modified_bessel_i1
    special_modified_bessel_k0 special_modified_bessel_k1 special_scaled_modified_bessel_k0
    special_scaled_modified_bessel_k1 special_chebyshev_polynomial_t special_chebyshev_polynomial_u
    special_chebyshev_polynomial_v special_chebyshev_polynomial_w
    special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
    special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w
    special_hermite_polynomial_h special_hermite_polynomial_he special_laguerre_polynomial_l
    special_legendre_polynomial_p special_airy_ai special_entr special_erfcx special_i0e special_i1
    special_i1e special_log_ndtr special_ndtri special_xlog1py special_zeta
    """.split()
)
"""Operators, without underscores around their names, whose shape functions let something pass.

Their kernels raise nothing that depends on elements, if these are zeros.
"""
