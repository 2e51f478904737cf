"""Products with matrices of int8, and layers of them, by torch_xla's rules.

>>> weight = torch.tensor([[2, 0], [0, 4]], dtype=torch.int8)
>>> quantized_matmul(torch.ones(1, 2), weight, torch.tensor([0.5, 0.25]))
tensor([[1., 1.]])
"""

from __future__ import annotations

import torch


def quantized_matmul(
    x: torch.Tensor,
    w: torch.Tensor,
    scaler: torch.Tensor,
    zero_point: torch.Tensor | None = None,
    block_size: int | None = -1,
    int4_weight: bool | None = False,
    quantize_activation: bool | None = False,
) -> torch.Tensor:
    """A product with a matrix of int8, with a scale for each output, or for each block of inputs.

    Args:
        x: (.., inputs).
        w: int8: (outputs, inputs); of blocks (inputs / block size, block size, outputs).
        scaler: (outputs,); of blocks (inputs / block size, outputs).
        zero_point: of the shape of `scaler`: what is taken off, as a multiple of the sum of the
            inputs.
        block_size: how many inputs share a scale; -1 for all.
        int4_weight: whether the numbers of `w` fit in 4 bits. It makes no difference.
        quantize_activation: round each row of `x` to int8 first, and multiply integers.

    Returns:
        (.., outputs).

    Raises:
        ValueError: shapes or dtypes do not fit, or activations are to be rounded with blocks.
    """
    size = -1 if block_size is None else block_size
    _check(x, w, scaler, zero_point, size, bool(quantize_activation))
    if size != -1:
        rows = x.unflatten(-1, (-1, size))
        out = (torch.einsum("scn,...sc->...sn", w.to(x.dtype), rows) * scaler).sum(-2)
        return out if zero_point is None else out - rows.sum(-1) @ zero_point
    if not quantize_activation:
        out = torch.nn.functional.linear(x, w.to(x.dtype)) * scaler
        return out if zero_point is None else out - x.sum(-1, keepdim=True) * zero_point
    scale = x.abs().amax(-1, keepdim=True) / 127
    rounded = (x / scale).round().clamp(-128, 127).to(torch.int32)
    out = torch.nn.functional.linear(rounded, w.to(torch.int32)) * scaler
    if zero_point is not None:
        out = out - rounded.sum(-1, keepdim=True) * zero_point
    return out * scale.to(x.dtype)


def _check(
    x: torch.Tensor,
    w: torch.Tensor,
    scaler: torch.Tensor,
    zero_point: torch.Tensor | None,
    size: int,
    quantize: bool,
) -> None:
    inputs = x.shape[-1]
    if size == -1:
        fits = w.dim() == 2 and w.shape[1] == inputs and scaler.shape == w.shape[:1]
        shapes = f"w (outputs, {inputs}) and scaler (outputs,)"
    else:
        blocks = w.shape[:1]
        fits = w.dim() == 3 and w.shape[1] == size and w.shape[0] * size == inputs
        fits = fits and tuple(scaler.shape) == (*blocks, w.shape[-1])
        shapes = f"w ({inputs} / {size}, {size}, outputs) and scaler ({inputs} / {size}, outputs)"
    if zero_point is not None:
        fits = fits and zero_point.shape == scaler.shape
    if not fits or w.dtype != torch.int8:
        point = "" if zero_point is None else f", zero_point {tuple(zero_point.shape)}"
        raise ValueError(
            f"quantized_matmul of x {tuple(x.shape)} takes an int8 {shapes}, and got "
            f"w {tuple(w.shape)} of {w.dtype} and scaler {tuple(scaler.shape)}{point}"
        )
    if quantize and size != -1:
        raise ValueError("quantized_matmul rounds activations only with one scale for each output")


class QuantizedLinear(torch.nn.Module):
    """A linear layer whose matrix is int8.

    Args:
        input_dim: inputs.
        output_dim: outputs.
        is_symmetric: whether there is no zero point.
        block_size: as for `quantized_matmul`.
        int4_weight: likewise.
        quantize_activation: likewise.
    """

    weight: torch.Tensor
    weight_scaler: torch.Tensor
    zero_point: torch.Tensor | None

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        is_symmetric: bool = False,
        block_size: int = -1,
        int4_weight: bool = False,
        quantize_activation: bool = False,
    ):
        """See the class."""
        super().__init__()
        self.input_dim, self.output_dim = input_dim, output_dim
        self.is_symmetric, self.block_size = is_symmetric, block_size
        self.int4_weight, self.quantize_activation = int4_weight, quantize_activation
        per_channel = block_size == -1
        blocks = 1 if per_channel else input_dim // block_size
        shape = (output_dim, input_dim) if per_channel else (blocks, block_size, output_dim)
        scales = (output_dim,) if per_channel else (blocks, output_dim)
        self.register_buffer("weight", torch.zeros(shape, dtype=torch.int8))
        self.register_buffer("weight_scaler", torch.zeros(scales))
        self.register_buffer("zero_point", None if is_symmetric else torch.zeros(scales))

    def load_quantized_weight(
        self,
        weight: torch.Tensor,
        weight_scaler: torch.Tensor,
        zero_point: torch.Tensor | None = None,
    ) -> None:
        """Take a matrix, its scales and zero points, of the shapes that `quantized_matmul` takes.

        Args:
            weight: int8.
            weight_scaler: the scales.
            zero_point: see `quantized_matmul`.

        Raises:
            ValueError: shapes do not fit.
        """
        example = torch.empty(0, self.input_dim)
        _check(example, weight, weight_scaler, zero_point, self.block_size, False)
        self.weight, self.weight_scaler, self.zero_point = weight, weight_scaler, zero_point

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`quantized_matmul` with what was loaded."""
        return quantized_matmul(
            x,
            self.weight,
            self.weight_scaler,
            self.zero_point,
            self.block_size,
            self.int4_weight,
            self.quantize_activation,
        )
