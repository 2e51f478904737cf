"""What torch's kernels refuse of the shapes and dtypes of single operators.

Its shape functions let this pass, or raise another error. Refusals that many operators share are in
`checks`.

>>> no_numbers("cat", {"tensors": [torch.zeros((), device="meta")]})
Traceback (most recent call last):
...
RuntimeError: zero-dimensional tensor (at position 0) cannot be concatenated
"""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from typing import Any

import torch

from isoshard.core.runtime.private_names import release

Arguments = dict[str, Any]

_DIVIDES_BY_WHOLE_STEPS = release(torch.__version__) < (2, 15)


def bool_mask(name: str, named: Arguments) -> None:
    """Refuse a mask that is no tensor of bools."""
    dtype = named["mask"].dtype
    if dtype != torch.bool:
        raise RuntimeError(f"{name}_ only supports boolean masks, but got mask with dtype {dtype}")


def inside_memory(name: str, named: Arguments) -> None:
    """Refuse a view that reaches beyond the memory of what it is of."""
    size, stride, offset = named["size"], named["stride"], named.get("storage_offset") or 0
    strides_for_each(size, stride)
    last = offset + sum(step * (extent - 1) for extent, step in zip(size, stride, strict=True))
    tensor = named["self"]
    have = 1 + sum(
        step * (extent - 1) for extent, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
    if 0 not in size and last >= have:
        raise RuntimeError(
            f"{name}: sizes {list(size)}, strides {list(stride)}, storage offset {offset} reach "
            f"element {last}, out of bounds for memory of {have} elements"
        )


def strides_for_each(size: Sequence[int], stride: Sequence[int]) -> None:
    """Refuse another number of strides than there are axes."""
    if len(size) != len(stride):
        raise RuntimeError(
            f"mismatch in length of strides and shape: sizes {list(size)}, strides {list(stride)}"
        )


def written_once(name: str, named: Arguments) -> None:
    """Refuse to write to memory in steps of zero."""
    for extent, step in zip(named["size"], named["stride"], strict=True):
        if extent > 1 and not step:
            raise RuntimeError(
                f"unsupported operation: {name} writes more than one element to a single memory "
                f"location: sizes {list(named['size'])}, strides {list(named['stride'])}"
            )


def fills_its_place(name: str, named: Arguments) -> None:
    """Refuse values of another shape than the view that they are written to."""
    tensor, source = named["self"], named["src"]
    if name == "select_scatter":
        place = tensor.select(named["dim"], named["index"])
    elif name == "slice_scatter":
        place = torch.ops.aten.slice(
            tensor, named["dim"], named["start"], named["end"], named["step"]
        )
    else:
        place = tensor.diagonal(named["offset"], named["dim1"], named["dim2"])
    if source.shape != place.shape:
        raise RuntimeError(
            f"{name}: expected src to have a size equal to the slice of self. src size = "
            f"{list(source.shape)}, slice size = {list(place.shape)}"
        )


def rows_of_targets(name: str, named: Arguments) -> None:
    """Refuse targets of another shape than the scores, and scores of no classes."""
    scores, target = named["self"], named["target"]
    shape = list(scores.shape)
    if len(shape) > 2 or (shape and not shape[-1]):
        raise RuntimeError(
            f"Expected non-empty vector or matrix with optional 0-dim batch size, but got: {shape}"
        )
    if shape != list(target.shape) and not (len(shape) < 2 and target.numel() == scores.numel()):
        raise RuntimeError(
            f"inconsistent target size: {list(target.shape)} for input of size: {shape}"
        )


def one_row_of_boundaries(name: str, named: Arguments) -> None:
    """Refuse boundaries of buckets that are no list."""
    if named["boundaries"].dim() != 1:
        raise RuntimeError(
            f"boundaries tensor must be 1 dimension, but got dim({named['boundaries'].dim()})"
        )


def some_bins(name: str, named: Arguments) -> None:
    """Refuse no bins, and edges of bins of another dtype than what is counted."""
    tensor, bins = named["self"], named["bins"]
    for each in bins if isinstance(bins, list | tuple) else (bins,):
        if isinstance(each, int) and each <= 0:
            raise RuntimeError(f"{name}: bins must be > 0, but got {each}")
        if isinstance(each, torch.Tensor) and each.dtype != tensor.dtype:
            raise RuntimeError(
                f"{name}: input tensor and bins tensors should have the same dtype, but got "
                f"{tensor.dtype} and {each.dtype}"
            )


def bins_for_each(name: str, named: Arguments) -> None:
    """Refuse another number of bins than there are axes to count along."""
    if named["self"].dim() < 2:
        raise RuntimeError(
            f"{name}: input tensor should have at least 2 dimensions, but got "
            f"{list(named['self'].shape)}"
        )
    if len(named["bins"]) != named["self"].shape[-1]:
        raise RuntimeError(
            "histogramdd: The size of bins must be equal to the innermost dimension of the input."
        )


def no_numbers(name: str, named: Arguments) -> None:
    """Refuse to concatenate what has no axis."""
    for place, tensor in enumerate(named["tensors"]):
        if not tensor.dim():
            raise RuntimeError(
                f"zero-dimensional tensor (at position {place}) cannot be concatenated"
            )


def step_goes_on(name: str, named: Arguments) -> None:
    """Refuse integers in steps of less than one where torch does: before 2.15, of 64 bits."""
    step, dtype = named.get("step", 1), named.get("dtype")
    start, end = named.get("start", 0), named["end"]
    if any(isinstance(bound, float) and not math.isfinite(bound) for bound in (start, end)):
        raise RuntimeError(f"unsupported range: {start} -> {end}")
    if step and (end - start) / step >= 2**63:
        raise RuntimeError(f"invalid size, possible overflow? {start} -> {end} by {step}")
    if dtype == torch.int64 and _DIVIDES_BY_WHOLE_STEPS and step and not int(step):
        raise ValueError("step must be nonzero")


def as_kernels_say(error: Exception) -> Exception:
    """An error of torch's shape functions, as its kernels raise it.

    Those that are written in Python raise `AssertionError` and `ValueError` where kernels raise
    `RuntimeError`, and some have taken a tuple for a text.

    Example:
        >>> as_kernels_say(RuntimeError("('a is ', 'no b')"))
        RuntimeError('a is no b')
    """
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    in_python = last is not None and _TORCH in last.tb_frame.f_globals.get("__name__", "")
    if str(error).startswith("('"):
        return type(error)("".join(ast.literal_eval(str(error))))
    if isinstance(error, AssertionError) or (in_python and type(error) is ValueError):
        return RuntimeError(str(error))
    return error


_TORCH = "torch."
