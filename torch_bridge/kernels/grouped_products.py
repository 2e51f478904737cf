"""Products with a matrix for each group of rows, and with matrices of int8, by torch_xla's names.

>>> import torch, isoshard.torch_bridge
>>> rows, matrices = torch.ones(3, 2, device="jax"), torch.ones(2, 2, 1, device="jax")
>>> gmm(rows, matrices, torch.tensor([2, 1]).to("jax")).flatten()
tensor([2., 2., 2.], device='jax:0')
"""

from __future__ import annotations

import jax
import torch

from isoshard.torch_bridge.interop.calling_jax import TorchFunction

from . import jax_kernels

_GMM = TorchFunction(jax_kernels.gmm, "gmm")
_TGMM = TorchFunction(jax_kernels.tgmm, "tgmm")
_QUANTIZED = TorchFunction(jax_kernels.quantized_matmul, "quantized_matmul")
_REPEAT = TorchFunction(
    lambda values, repeats, length: jax.numpy.repeat(values, repeats, total_repeat_length=length),
    "repeat_with_fixed_output_size",
)


def gmm(
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    group_sizes: torch.Tensor,
    tiling: tuple[int, int, int] | None = None,
    group_offset: torch.Tensor | None = None,
    transpose_rhs: bool = False,
) -> torch.Tensor:
    """Groups of rows, each times a matrix of its own (a mixture of experts). It has gradients.

    Args:
        lhs: (rows, k); the rows of group 0, then those of group 1, ..
        rhs: (groups, k, n); (groups, n, k) if `transpose_rhs`.
        group_sizes: (all groups,), int32: how many rows each group has.
        tiling: does nothing.
        group_offset: the group of the first matrix, where there are fewer matrices than groups; the
            rows of other groups become zero.
        transpose_rhs: whether the matrices are turned.

    Returns:
        (rows, n).
    """
    return _GMM(lhs, rhs, group_sizes, group_offset, transpose_rhs=bool(transpose_rhs))


def tgmm(
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    group_sizes: torch.Tensor,
    tiling: tuple[int, int, int] = (512, 512, 512),
    group_offset: torch.Tensor | None = None,
    num_actual_groups: int | None = None,
) -> torch.Tensor:
    """For each group its columns of `lhs` times its rows of `rhs`.

    Args:
        lhs: (k, rows).
        rhs: (rows, n).
        group_sizes: (all groups,), int32: how many rows each group has.
        tiling: does nothing.
        group_offset: the first group of the result.
        num_actual_groups: how many groups the result has; all if None.

    Returns:
        (groups, k, n).
    """
    groups = group_sizes.shape[0] if num_actual_groups is None else num_actual_groups
    return _TGMM(lhs, rhs, group_sizes, group_offset, groups=groups)


def gmm_backward(
    grad: torch.Tensor,
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    group_sizes: torch.Tensor,
    tiling: tuple[int, int, int] = (512, 512, 512),
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of `gmm(lhs, rhs, group_sizes)`.

    Args:
        grad: (rows, n), the gradient of its result.
        lhs: (rows, k).
        rhs: (groups, k, n).
        group_sizes: (groups,), int32.
        tiling: does nothing.

    Returns:
        The gradients of `lhs` and `rhs`.
    """
    turned = gmm(grad, rhs, group_sizes, tiling, transpose_rhs=True)
    return turned, tgmm(lhs.t(), grad, group_sizes, tiling)


def quantized_matmul_int8(
    x: torch.Tensor,
    w: torch.Tensor,
    scalar: torch.Tensor,
    zero_point: torch.Tensor | None = None,
    quant_block_size: torch.Tensor | None = None,
    quantize_activation: bool = False,
    batch_block_size: int | None = None,
    out_block_size: int | None = None,
    in_block_size: int | None = None,
) -> torch.Tensor:
    """A product with a matrix of int8.

    Args:
        x: (rows, inputs).
        w: (outputs, inputs), int8.
        scalar: (outputs,), what each output is multiplied by.
        zero_point: must be None.
        quant_block_size: must be None.
        quantize_activation: round each row of `x` to int8 first, and multiply integers.
        batch_block_size: does nothing.
        out_block_size: does nothing.
        in_block_size: does nothing.

    Returns:
        (rows, outputs).

    Raises:
        ValueError: a zero point or a block size is passed.
    """
    if zero_point is not None or quant_block_size is not None:
        raise ValueError(
            "quantized_matmul_int8 has one scale for each output; for zero points and blocks "
            "multiply in torch: torch.nn.functional.linear(x, (w - zero_point) * scale)"
        )
    return _QUANTIZED(x, w, scalar, quantize_activation=bool(quantize_activation))


def repeat_with_fixed_output_size(
    input: torch.Tensor, repeats: torch.Tensor, total_repeat_length: int
) -> torch.Tensor:
    """`torch.repeat_interleave` to a static length.

    Args:
        input: one axis.
        repeats: how often each element comes.
        total_repeat_length: the result is cropped to this length, or filled with the last element.

    Returns:
        (total_repeat_length,).
    """
    return _REPEAT(input, repeats, length=int(total_repeat_length))
