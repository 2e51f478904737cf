"""What the two devices may do differently, with the reason; docs/pytorch.md tells users.

Everything else is a fault.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .program import Program

BY_VALUES = {
    r"out of (range|bounds|DATA bounds)": "a compiled program cannot raise for an index; only "
    "values say that it is out of range",
    r"ZeroDivisionError": "nor for an integer divided by zero",
    r"not implemented for '|on CPU does not|on CPU$": "a gap of torch's CPU kernels, "
    "which JAX may not have",
    r"unresolved conjugated": "a conjugate is computed on the device, where the CPU notes it",
    r"modified by an inplace operation": "each device keeps other tensors for backward; "
    "what is not kept may be written to",
    r"isFloatingType\(grad.scalar_type": "an assertion inside torch: a real number broadcast into "
    "complex memory has its gradient here",
    r"single memory location|overlap": "memory that overlaps itself is checked by each device in "
    "its own way",
}
"""Messages of CPU torch for which the line is left out, and why."""

_BY_VALUES = re.compile("|".join(f"(?:{pattern})" for pattern in BY_VALUES))

LARGEST = {
    torch.float32: 1e6,
    torch.float64: 1e12,
    torch.bfloat16: 1e4,
    torch.complex64: 1e4,
    torch.complex128: 1e8,
}
"""Numbers beyond are left out: rounding would decide what becomes of them."""


def by_values(error: Exception) -> bool:
    """Whether the CPU refused a line for its values or for a gap of its own."""
    text = str(error)
    if "Dimension out of range" in text:
        return False
    return _BY_VALUES.search(text) is not None


def unfit(tensor: torch.Tensor, elements: int) -> bool:
    """Whether a result is left out: it is too large."""
    tensor = tensor.detach()
    if tensor.numel() > elements:
        return True
    if tensor.is_complex() and not bool(tensor.isfinite().all()):
        return True  # each library has its own arithmetic of complex infinities
    return bool(too_large(tensor).any())


def too_large(tensor: torch.Tensor) -> torch.Tensor:
    """Which numbers of a result or gradient are finite and beyond `LARGEST`."""
    largest = LARGEST.get(tensor.dtype)
    if largest is None:
        return torch.zeros(tensor.shape, dtype=torch.bool)
    size = tensor.abs()
    return (size > largest) & size.isfinite()


def bits_of_nan(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether integers are read from the memory of a NaN: its bits are any of millions."""
    seen = [tensor.detach() for tensor in tensors]
    whole = {tensor.untyped_storage().data_ptr() for tensor in seen if not _may_be_nan(tensor)}
    nan = [tensor for tensor in seen if _may_be_nan(tensor) and bool(tensor.isnan().any())]
    return any(tensor.untyped_storage().data_ptr() in whole for tensor in nan)


def _may_be_nan(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


_UNDECIDED = {
    r"\b[cs]?elu_?\b|hardswish|hardtanh|relu6|hardshrink|softshrink": "torch's vector "
    "and scalar kernels take another piece of the function; which of them runs depends on the "
    "strides",
    r"renorm": "where a row's norm is NaN, one of torch's formulas multiplies it by 0",
    r"prod\(": "torch divides the product by each number, but for subclasses of tensors",
    r"digamma": "it has a pole there, at which torch's gradient is finite: its sine is rounded",
}
_AT_NAN = re.compile("|".join(_UNDECIDED))


def undecided(text: str, tensor: torch.Tensor) -> bool:
    """Whether torch's gradient of a line that gave NaN, or infinity, is not the function's."""
    if not tensor.requires_grad or _AT_NAN.search(text) is None:
        return False
    made = tensor.detach()
    return bool(made.isnan().any()) or ("prod(" in text and bool(made.isinf().any()))


_SPREADS = re.compile(r"(max|min|median|nanmedian)\(\)")


def spreads_nan(program: Program) -> bool:
    """Whether a NaN gradient of one number reaches elements that have no part in it.

    torch's formula for `x.max()` and its like multiplies by a mask, except on the CPU.
    """
    return any(_SPREADS.search(line.text) for line in program.lines)


_STRIDES = re.compile(
    r"ldexp|one_hot|_scatter\(|sort|topk|kthvalue|\[.*torch\.tensor"
    r"|\w\[.*\["
)
"""Results whose strides torch's CPU kernels and its shape functions give differently."""


def strides(program: Program) -> set[str]:
    """Names of the tensors whose strides torch does not promise."""
    free: set[str] = set()
    for line in program.lines:
        words = re.findall(r"[a-z]\w*", line.text)
        if _STRIDES.search(line.text) or free.intersection(words):
            bound = re.match(r"(\w+) = ", line.text)
            if bound:
                free.add(bound[1])
    return free
