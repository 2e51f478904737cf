"""Operators that torch composes of others, composed in another way on the `jax` device.

`torch.linalg.pinv(x)` fills a float64 tensor with its tolerance, `matrix_rank` and the gradient of
`renorm` do the like. Without `jax_enable_x64` these would raise, though no user asked for float64.
So the `jax` device brings its own composition, in the dtype of the argument; autograd
differentiates it as usual. Attention, which torch makes of twenty operators, is one here.

>>> import torch
>>> torch.linalg.matrix_rank(torch.eye(3, device="jax"))
tensor(3, device='jax:0')
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from isoshard.torch_bridge.common import naming
from isoshard.torch_bridge.engine.operators import dispatch, out_arguments
from isoshard.torch_bridge.kernels import attention_choice

from ..overrides.quantile import nanquantile, quantile


def _as_tensor(value: Any, like: torch.Tensor) -> torch.Tensor | None:
    """A tolerance as a tensor of the real dtype of `like`."""
    real = like.real.dtype if like.is_complex() else like.dtype
    if value is None or isinstance(value, torch.Tensor):
        return None if value is None else value.to(real)
    return torch.full((), value, dtype=real, device=like.device)


def _pinv(
    self: torch.Tensor,
    *,
    atol: float | None = None,
    rtol: float | None = None,
    hermitian: bool = False,
) -> torch.Tensor:
    tolerances = {"atol": _as_tensor(atol, self), "rtol": _as_tensor(rtol, self)}
    return torch.ops.aten.linalg_pinv.atol_rtol_tensor(self, **tolerances, hermitian=hermitian)


def _old_pinv(self: torch.Tensor, rcond: Any = 1e-15, hermitian: bool = False) -> torch.Tensor:
    return torch.ops.aten.linalg_pinv.atol_rtol_tensor(
        self, atol=_as_tensor(0.0, self), rtol=_as_tensor(rcond, self), hermitian=hermitian
    )


def _matrix_rank(
    input: torch.Tensor, *, atol: Any = None, rtol: Any = None, hermitian: bool = False
) -> torch.Tensor:
    """How many singular values exceed `max(atol, rtol * the largest)`."""
    size = torch.linalg.eigvalsh(input).abs() if hermitian else torch.linalg.svdvals(input)
    if size.shape[-1] == 0:
        return torch.zeros(input.shape[:-2], dtype=torch.int64, device=input.device)
    atol, rtol = _as_tensor(atol, input), _as_tensor(rtol, input)
    if rtol is None:
        default = max(input.shape[-2:]) * torch.finfo(size.dtype).eps
        rtol = torch.full((), default, dtype=size.dtype, device=input.device)
        rtol = rtol if atol is None else torch.where(atol > 0, 0.0, rtol)
    least = rtol[..., None] * size.amax(-1, keepdim=True)
    least = least if atol is None else torch.maximum(atol[..., None], least)
    return (size > least).sum(-1)


def _matrix_rank_above(self: torch.Tensor, tol: Any, hermitian: bool = False) -> torch.Tensor:
    return _matrix_rank(self, atol=tol, rtol=0.0, hermitian=hermitian)


def _renorm(self: torch.Tensor, p: float, dim: int, maxnorm: float) -> torch.Tensor:
    """Slices along `dim` whose norm is above `maxnorm`, shrunk to it."""
    if self.dim() < 2:
        raise RuntimeError(
            f"renorm: input needs at least 2 dimensions, got {self.dim()} dimensions"
        )
    if not isinstance(p, int | float) or p <= 0:
        raise RuntimeError(f"renorm: non-positive norm not supported, got {p}")
    if maxnorm < 0:
        raise RuntimeError(f"renorm: expected maxnorm to be >= 0 but got {maxnorm}")
    self.size(dim)  # raises torch's error for an axis that is not there
    axes = [axis for axis in range(self.dim()) if axis != dim % self.dim()]
    half = self.dtype in (torch.float16, torch.bfloat16)
    norm = torch.linalg.vector_norm(
        self, p, axes, keepdim=True, dtype=torch.float32 if half else None
    )
    factor = torch.where(norm > maxnorm, maxnorm / (norm + 1e-7), 1.0)
    return (self * factor).to(self.dtype).contiguous()


def _ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """Torch's own composition; lengths may be on the CPU, as they may be with CUDA."""
    lengths = [x.to(log_probs.device) for x in (input_lengths, target_lengths)]
    return torch.ops.aten.ctc_loss.Tensor.decompose(log_probs, targets, *lengths, *args, **kwargs)


def _diagonal_scatter(
    self: torch.Tensor, src: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> torch.Tensor:
    """Real numbers in a complex diagonal have real gradients; torch gives them complex ones."""
    result = self.clone()
    result.diagonal(offset, dim1, dim2).copy_(src)
    return result


def _into(function: Any) -> Any:
    """The `out=` variant of an operator."""

    def run(*args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        result = function(*args, **kwargs)
        if not torch.can_cast(result.dtype, out.dtype):
            raise RuntimeError(
                f"result type {result.dtype} can't be cast to the desired output type {out.dtype}"
            )
        if out.shape != result.shape:
            out_arguments.warn_of_resizing(out, result)
        return out.resize_(result.shape).copy_(result)

    return run


_COMPOSITES = {
    "scaled_dot_product_attention": attention_choice.attend,
    "ctc_loss.Tensor": _ctc_loss,
    "diagonal_scatter": _diagonal_scatter,
    "linalg_pinv.atol_rtol_float": _pinv,
    "linalg_pinv": _old_pinv,
    "linalg_pinv.rcond_tensor": _old_pinv,
    "linalg_matrix_rank": _matrix_rank_above,
    "linalg_matrix_rank.tol_tensor": _matrix_rank_above,
    "linalg_matrix_rank.atol_rtol_float": _matrix_rank,
    "linalg_matrix_rank.atol_rtol_tensor": _matrix_rank,
    "linalg_pinv.atol_rtol_float_out": _into(_pinv),
    "linalg_pinv.out": _into(_old_pinv),
    "linalg_pinv.out_rcond_tensor": _into(_old_pinv),
    "linalg_matrix_rank.out": _into(_matrix_rank_above),
    "linalg_matrix_rank.out_tol_tensor": _into(_matrix_rank_above),
    "linalg_matrix_rank.atol_rtol_float_out": _into(_matrix_rank),
    "linalg_matrix_rank.atol_rtol_tensor_out": _into(_matrix_rank),
    "renorm": _renorm,
    "quantile": quantile,
    "quantile.scalar": quantile,
    "quantile.out": _into(quantile),
    "quantile.scalar_out": _into(quantile),
    "nanquantile": nanquantile,
    "nanquantile.scalar": nanquantile,
    "nanquantile.out": _into(nanquantile),
    "nanquantile.scalar_out": _into(nanquantile),
    # These would look for the results in memory that C++ believes the views of `out` to share.
    "matmul.out": _into(torch.matmul),
    "kron.out": _into(torch.kron),
}


def _worded(function: Any) -> Any:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with naming.in_users_words():
            return function(*args, **kwargs)

    return run


def _handler(function: Any) -> dispatch.Handler:
    return lambda args, kwargs: function(*args, **kwargs)


def register() -> list[torch.library.Library]:
    """Give torch the compositions; they last as long as the libraries that are returned."""
    library = torch.library.Library("aten", "IMPL")
    for name, composite in _COMPOSITES.items():
        packet, _, overload = name.partition(".")
        function = _worded(composite)
        if hasattr(getattr(torch.ops.aten, packet, None), overload or "default"):
            library.impl(name, function, "AutogradLazy")
            # Inference mode goes by autograd, and comes to our dispatcher at once.
            dispatch.SPECIAL[f"aten::{name}"] = _handler(function)
    for name, function in attention_choice.GRADIENTS.items():
        if hasattr(torch.ops.aten, name):
            library.impl(name, function, "AutogradLazy")
    return [library]
