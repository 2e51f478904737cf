"""Checks of shapes, strides and ranges by torch's kernels, where they compute with these.

Torch's shape functions let this pass, or raise another error.

>>> check_as_strided("as_strided", {"self": torch.ones(3), "size": [2], "stride": [3]})
Traceback (most recent call last):
...
RuntimeError: as_strided: sizes [2], strides [3], storage offset 0 reach element 3, out of bounds for memory of 3 elements
"""  # noqa: E501

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from isoshard.core.runtime.private_names import release

Arguments = dict[str, Any]

_DIVIDES_BY_INTEGRAL_STEPS = release(torch.__version__) < (2, 15)

SPELLED = {
    torch.bool: "Bool",
    torch.uint8: "Byte",
    torch.int8: "Char",
    torch.int16: "Short",
    torch.int32: "Int",
    torch.int64: "Long",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.float32: "Float",
    torch.float64: "Double",
    torch.complex64: "ComplexFloat",
    torch.complex128: "ComplexDouble",
}
"""The dtypes that torch's CPU kernels compute with, as their errors spell them."""


def spelled(dtype: torch.dtype) -> str:
    """The name of a dtype in the errors of torch's kernels.

    >>> spelled(torch.int64)
    'Long'
    """
    return SPELLED.get(dtype, str(dtype))


def is_integral(dtype: torch.dtype) -> bool:
    """Whether a dtype is of integers or bools."""
    return not (dtype.is_floating_point or dtype.is_complex)


def tensors_of(named: Arguments) -> list[torch.Tensor]:
    """The arguments that are tensors; those in lists do not count."""
    return [value for value in named.values() if isinstance(value, torch.Tensor)]


def first_tensor(named: Arguments) -> torch.Tensor:
    """The first argument that is a tensor."""
    return tensors_of(named)[0]


def requested_dtype(named: Arguments) -> torch.dtype | None:
    """The dtype that a call requests; the default of a schema is a number, and requests none."""
    dtype = named.get("dtype")
    return dtype if isinstance(dtype, torch.dtype) else None


def check_as_strided(name: str, named: Arguments) -> None:
    """Reject a view that reaches beyond the memory of its base."""
    size, stride, offset = named["size"], named["stride"], named.get("storage_offset") or 0
    check_stride_count(size, stride)
    last = offset + sum(step * (extent - 1) for extent, step in zip(size, stride, strict=True))
    tensor = named["self"]
    count = 1 + sum(
        step * (extent - 1) for extent, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
    if 0 not in size and last >= count:
        raise RuntimeError(
            f"{name}: sizes {list(size)}, strides {list(stride)}, storage offset {offset} reach "
            f"element {last}, out of bounds for memory of {count} elements"
        )


def check_stride_count(size: Sequence[int], stride: Sequence[int]) -> None:
    """Reject another number of strides than there are axes."""
    if len(size) != len(stride):
        raise RuntimeError(
            f"mismatch in length of strides and shape: sizes {list(size)}, strides {list(stride)}"
        )


def check_written_once(name: str, named: Arguments) -> None:
    """Reject writes to memory in steps of zero."""
    for extent, step in zip(named["size"], named["stride"], strict=True):
        if extent > 1 and not step:
            raise RuntimeError(
                f"unsupported operation: {name} writes more than one element to a single memory "
                f"location: sizes {list(named['size'])}, strides {list(named['stride'])}"
            )


def check_scattered_view(name: str, named: Arguments) -> None:
    """Reject values of another shape than the view that they are written to."""
    tensor, source = named["self"], named["src"]
    if name == "select_scatter":
        view = tensor.select(named["dim"], named["index"])
    elif name == "slice_scatter":
        view = torch.ops.aten.slice(
            tensor, named["dim"], named["start"], named["end"], named["step"]
        )
    else:
        view = tensor.diagonal(named["offset"], named["dim1"], named["dim2"])
    if source.shape != view.shape:
        raise RuntimeError(
            f"{name}: expected src to have a size equal to the slice of self. src size = "
            f"{list(source.shape)}, slice size = {list(view.shape)}"
        )


def check_arange(name: str, named: Arguments) -> None:
    """Reject bools, and integers in steps of less than one as torch before 2.15 does."""
    step, dtype = named.get("step", 1), requested_dtype(named)
    start, end = named.get("start", 0), named["end"]
    if any(isinstance(bound, float) and not math.isfinite(bound) for bound in (start, end)):
        raise RuntimeError(f"unsupported range: {start} -> {end}")
    if step and (end - start) / step >= 2**63:
        raise RuntimeError(f"invalid size, possible overflow? {start} -> {end} by {step}")
    if dtype == torch.int64 and _DIVIDES_BY_INTEGRAL_STEPS and step and not int(step):
        raise ValueError("step must be nonzero")
    if dtype == torch.bool:
        raise NotImplementedError(f"\"{name}\" not implemented for 'Bool'")


def check_permutation(name: str, named: Arguments) -> None:
    """Reject a permutation of more numbers than its dtype distinguishes."""
    dtype, count = requested_dtype(named) or torch.int64, named["n"]
    if dtype.is_floating_point:
        most = round(2 / torch.finfo(dtype).eps) + 1
        if count > most:
            raise RuntimeError(f"n cannot be greater than {most} for {spelled(dtype)} type.")
    elif dtype != torch.bool and count - 1 > torch.iinfo(dtype).max:
        raise RuntimeError(f"n {count} cannot be converted to type {dtype} without overflow")


def check_multinomial(name: str, named: Arguments) -> None:
    """Reject draws from what is no list of probabilities, and draws of nothing."""
    weights, count = named["self"], named["num_samples"]
    if weights.dim() not in (1, 2):
        raise RuntimeError(f"prob_dist must be 1 or 2 dim, but has {weights.dim()}")
    if not weights.dtype.is_floating_point:
        raise RuntimeError(
            "multinomial only supports floating-point dtypes for input, got: "
            f"{spelled(weights.dtype)}"
        )
    if count <= 0:
        raise RuntimeError(f"cannot sample n_sample <= 0 samples: {count}")
    if not named.get("replacement", False) and count > weights.shape[-1]:
        raise RuntimeError(
            "cannot sample n_sample > prob_dist.size(-1) samples without replacement: "
            f"{count} of {weights.shape[-1]}"
        )
    if weights.shape[-1] > 2**24:
        raise RuntimeError("number of categories cannot exceed 2^24")


def as_kernel_error(error: Exception) -> Exception:
    """An error of torch's shape functions, as its kernels raise it.

    Those that are written in Python raise `AssertionError` and `ValueError` where kernels raise
    `RuntimeError`, and some have taken a tuple for a text.

    Example:
        >>> as_kernel_error(RuntimeError("('a is ', 'no b')"))
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

CHECKS: dict[str, tuple[Callable[[str, Arguments], None], ...]] = {
    "arange": (check_arange,),
    "as_strided_copy": (check_as_strided,),
    "as_strided_scatter": (check_as_strided, check_written_once),
    **dict.fromkeys(("select_scatter", "slice_scatter"), (check_scattered_view,)),
    "diagonal_scatter": (check_scattered_view,),
    "multinomial": (check_multinomial,),
    "randperm": (check_permutation,),
}
"""The checks of an operator, by its name without underscores."""
