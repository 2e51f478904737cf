"""`torch.autocast("jax", dtype)`: which operators run in a lower precision, and which in float32.

Tensors on the `jax` device carry torch's dispatch key `AutocastPrivateUse1`. Outside an autocast
region torch skips that key, so nothing is paid for it; inside one it calls the kernels registered
here, which cast the arguments and run the operator again below autocast and above autograd. So the
gradient of a float32 weight arrives in float32, though the matrix product took a bfloat16 copy.

>>> weight = torch.ones(2, 2, device="jax", requires_grad=True)
>>> with torch.autocast("jax", torch.bfloat16):
...     product = torch.ones(3, 2, device="jax") @ weight
...     total = product.sum()
>>> product.dtype, total.dtype
(torch.bfloat16, torch.float32)
>>> total.backward()
>>> weight.grad.dtype
torch.float32

The lists are those that torch offers every backend (the CUDA lists without cuDNN's own operators),
read from `ATen/autocast_mode.h` of torch 2.13. What an older torch does not cast on CUDA is not
cast here either (`rms_norm` in 2.11). torch's cache of cast weights is not needed: a weight used
twice is cast twice on the tape, and XLA does it once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from isoshard.torch_bridge._torch_internals import schema_of
from isoshard.torch_bridge._torch_internals.dispatcher import (
    DispatchKey,
    excluding,
    has_fallback,
    has_kernel,
)
from isoshard.torch_bridge._torch_internals.undocumented import get_autocast_dtype
from isoshard.torch_bridge.common import naming
from isoshard.torch_bridge.engine.recording import lazy_tensor

DTYPES = (torch.bfloat16, torch.float16)
"""What autocast may cast to."""

LOWER_PRECISION = """
    _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d
    conv_transpose2d.input conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum
    mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot
    _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    _scaled_dot_product_flash_attention scaled_dot_product_attention
""".split()

FLOAT32 = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan
    pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm
    group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss
    cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss
    huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
    triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm
    logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
    _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d
    upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
    _upsample_bicubic2d_aa
""".split()

FLOAT32_DTYPE = """
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm
    linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList
""".split()
"""Operators with a `dtype=` argument: it becomes float32 unless it was passed."""

FLOAT32_APPEND = {
    "norm.Scalar": "norm.ScalarOpt_dtype",
    "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype",
}
"""Overloads without a `dtype=` argument, and those with one that run instead."""

PROMOTE = """
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
""".split()
"""Operators that run in the widest dtype among their arguments."""

BANNED = "binary_cross_entropy"

XLA_LOWER_PRECISION = "relu max_pool2d".split()

XLA_FLOAT32 = """
    batch_norm cross_entropy_loss ctc_loss.IntList ctc_loss.Tensor trace polar view_as_complex
    quantile quantile.scalar nanquantile nanquantile.scalar stft stft.center reflection_pad1d
    reflection_pad2d replication_pad1d replication_pad2d replication_pad3d
    fake_quantize_per_tensor_affine fft_fft fft_ifft fft_fft2 fft_ifft2 fft_fftn fft_ifftn fft_rfft
    fft_irfft fft_rfft2 fft_irfft2 fft_rfftn fft_irfftn fft_hfft fft_ihfft cholesky cholesky_inverse
    cholesky_solve inverse orgqr ormqr pinverse geqrf qr svd triangular_solve linalg_cond
    linalg_cond.p_str linalg_matrix_rank linalg_matrix_rank.tol_tensor
    linalg_matrix_rank.atol_rtol_tensor linalg_matrix_rank.atol_rtol_float linalg_solve
    linalg_cholesky linalg_cholesky_ex linalg_svd linalg_svdvals linalg_eig linalg_eigh
    linalg_eigvals linalg_eigvalsh linalg_inv linalg_inv_ex linalg_householder_product
    linalg_tensorinv linalg_tensorsolve linalg_lstsq linalg_qr
""".split()
"""What torch_xla's lists have besides, from its page on AMP and `csrc/autocast_mode.cpp`."""

_KEY = "AutocastPrivateUse1"

_ELIGIBLE = frozenset({torch.float32, *DTYPES})


def register() -> list[torch.library.Library]:
    """Give torch the kernels; they last as long as the libraries that are returned."""
    library = torch.library.Library("aten", "IMPL")
    policies: list[tuple[Iterable[str], Callable[[Any], Any]]] = [
        (LOWER_PRECISION, _lower_precision),
        (FLOAT32, _float32),
        (FLOAT32_DTYPE, _float32_dtype),
        (FLOAT32_APPEND, _float32_append),
        (PROMOTE, _promote),
        ([BANNED], _banned),
    ]
    _implement(library, policies)
    rest = torch.library.Library("_", "IMPL")
    if not has_fallback(getattr(DispatchKey, _KEY)):
        rest.fallback(torch.library.fallthrough_kernel, _KEY)
    return [library, rest]


def register_xla() -> None:
    """Give torch the kernels for operators that only torch_xla casts, the first time."""
    if not _XLA:
        _XLA.append(torch.library.Library("aten", "IMPL"))
        _implement(_XLA[0], [(XLA_LOWER_PRECISION, _lower_precision), (XLA_FLOAT32, _float32)])


_XLA: list[torch.library.Library] = []  # as long as the process lasts


def _implement(
    library: torch.library.Library,
    policies: list[tuple[Iterable[str], Callable[[Any], Any]]],
) -> None:
    for names, policy in policies:
        for name in names:
            func = _overload(name)
            if func is not None and (library in _XLA or has_kernel(func.name(), "AutocastCUDA")):
                library.impl(name, _below_autocast(policy(func)), _KEY)


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)


def _below_autocast(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with excluding(lazy_tensor.AUTOCAST):
            return kernel(*args, **kwargs)

    return run


def _is_eligible(arg: Any) -> bool:
    return (
        isinstance(arg, torch.Tensor)
        and arg.dtype in _ELIGIBLE
        and arg.device.type in naming.OURS  # a tensor of `torch.func` reports `lazy`
    )


def _cast(arg: Any, dtype: torch.dtype) -> Any:
    if _is_eligible(arg):
        return arg if arg.dtype == dtype else torch.ops.aten._to_copy.default(arg, dtype=dtype)
    return [_cast(leaf, dtype) for leaf in arg] if isinstance(arg, list | tuple) else arg


def _cast_all(func: Any, args: Any, kwargs: Any, dtype: torch.dtype) -> Any:
    named = {name: _cast(value, dtype) for name, value in kwargs.items()}
    return func(*[_cast(arg, dtype) for arg in args], **named)


def _lower_precision(func: Any) -> Any:
    return lambda *args, **kwargs: _cast_all(func, args, kwargs, get_autocast_dtype("jax"))


def _float32(func: Any) -> Any:
    return lambda *args, **kwargs: _cast_all(func, args, kwargs, torch.float32)


def _float32_dtype(func: Any) -> Any:
    position = [argument.name for argument in schema_of(func).arguments].index("dtype")

    def run(*args: Any, **kwargs: Any) -> Any:
        has_dtype = len(args) > position or kwargs.get("dtype") is not None
        if has_dtype or not _is_eligible(args[0]):
            return func(*args, **kwargs)
        return func(*args, **{**kwargs, "dtype": torch.float32})

    return run


def _float32_append(func: Any) -> Any:
    with_dtype = _overload(FLOAT32_APPEND[func.name().removeprefix("aten::")])

    def run(tensor: torch.Tensor, p: float | None, *args: Sequence[int] | bool) -> torch.Tensor:
        dtype = torch.float32 if _is_eligible(tensor) else tensor.dtype
        return with_dtype(tensor, p, *args, dtype=dtype)

    return run


def _promote(func: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        dtype = get_autocast_dtype("jax")
        leaves = [leaf for arg in args for leaf in (arg if isinstance(arg, list) else [arg])]
        dtypes = {leaf.dtype for leaf in leaves if _is_eligible(leaf)}
        if torch.float32 in dtypes:
            return _cast_all(func, args, kwargs, torch.float32)
        if not dtypes <= {dtype}:
            others = ", ".join(map(str, sorted(dtypes - {dtype}, key=str)))
            raise RuntimeError(
                f"{func} under torch.autocast('jax', {dtype}) got {others}; autocast mixes "
                f"{dtype} with torch.float32 only. Cast the operand with .to({dtype}) or .float()"
            )
        return func(*args, **kwargs)

    return run


def _banned(func: Any) -> Any:
    """Refused as everywhere in torch; torch_xla runs it in float32."""
    in_float32 = _float32(func)

    def run(*args: Any, **kwargs: Any) -> Any:
        if naming.is_torch_xla():
            return in_float32(*args, **kwargs)
        raise RuntimeError(
            "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast: "
            "a sigmoid in low precision before them loses the gradient. Use "
            "binary_cross_entropy_with_logits or torch.nn.BCEWithLogitsLoss, which are safe, or "
            "run this loss on float32 inputs inside torch.autocast('jax', enabled=False)."
        )

    return run
