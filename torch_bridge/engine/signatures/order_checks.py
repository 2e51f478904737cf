"""What torch's kernels refuse of sorting, selecting, reducing, shifting, and dividing integers.

Its shape functions let this pass, or raise another error. Only what no kernel of torch computes is
refused. The dtypes that kernels of single operators do not know stand in `dtype_checks`.

>>> enough_to_select("topk", {"self": torch.zeros(3, device="meta"), "k": 4})
Traceback (most recent call last):
...
RuntimeError: selected index k out of range
"""

from __future__ import annotations

from typing import Any

import torch

from .kernel_checks import is_whole, spelled

Arguments = dict[str, Any]


def _missing(name: str, dtype: torch.dtype) -> NotImplementedError:
    return NotImplementedError(f"\"{name}\" not implemented for '{spelled(dtype)}'")


def enough_to_select(name: str, named: Arguments) -> None:
    """Refuse to select more elements than an axis has."""
    tensor, k, dim = named["self"], named["k"], named.get("dim", -1)
    extent = tensor.shape[dim] if tensor.dim() else 1
    if name == "topk" and not 0 <= k <= extent:
        raise RuntimeError("selected index k out of range")
    place = dim % max(tensor.dim(), 1)
    if name == "kthvalue" and not extent:
        raise IndexError(f"kthvalue(): Expected reduction dim {place} to have non-zero size.")
    if name == "kthvalue" and not 1 <= k <= extent:
        raise RuntimeError(f"kthvalue(): selected number k out of range for dimension {place}")


def orders_rows(name: str, named: Arguments) -> None:
    """Refuse to sort complex numbers, and to select bools."""
    dtype = named["self"].dtype
    if dtype.is_complex:
        raise RuntimeError(f"{name} does not support complex dtypes")
    if name == "topk" and dtype == torch.bool:
        raise RuntimeError("topk does not support bool dtypes")


def selects_numbers(name: str, named: Arguments) -> None:
    """Refuse medians and k-th values of bools and complex numbers."""
    dtype = named["self"].dtype
    unknown = dtype == torch.bool or dtype.is_complex
    if unknown and (named["self"].numel() or "dim" in named):
        raise _missing(name, dtype)


def sorts_into_buckets(name: str, named: Arguments) -> None:
    """Refuse buckets of bools and complex numbers, and an order that is not in int64."""
    sorter = named.get("sorter")
    if sorter is not None and sorter.dtype != torch.int64:
        raise RuntimeError(
            f"torch.{name}(): sorter must be a tensor of long dtype but got dtype "
            f"{spelled(sorter.dtype)}"
        )
    bounds = named["sorted_sequence" if name == "searchsorted" else "boundaries"]
    values = named["self"]
    dtype = torch.result_type(bounds, values)
    some = not isinstance(values, torch.Tensor) or values.numel() > 0
    if some and (dtype == torch.bool or dtype.is_complex):
        raise _missing(name, dtype)


def orders_complex(name: str, named: Arguments) -> None:
    """Refuse the extremes of complex numbers, along an axis and at all."""
    tensor = named["self"]
    if not tensor.is_complex():
        return
    if name == "aminmax" and not tensor.dim() and named.get("dim") is not None:
        raise RuntimeError(f"aminmax not implemented for {spelled(tensor.dtype)}")
    if name != "aminmax" and "dim" in named:
        raise RuntimeError(f"{name}(): does not support complex input")
    raise _missing(name, tensor.dtype)


def axes_to_sum(name: str, named: Arguments) -> None:
    """Refuse `logsumexp` of no axes, for which torch has no place to write to."""
    tensor = named["self"]
    no_place = tensor.dim() and tensor.numel() and not named.get("keepdim")
    if not named["dim"] and no_place:
        raise RuntimeError(
            "output with shape [] doesn't match the broadcast shape "
            f"{[1] * tensor.dim()}: {name} needs dim="
        )


def means_of_floats(name: str, named: Arguments) -> None:
    """Refuse the mean of integers, unless it is asked for in floats."""
    given = named.get("dtype")
    dtype = given if isinstance(given, torch.dtype) else named["self"].dtype
    if is_whole(dtype):
        which = "Optional" if dtype is given else "Input"
        raise RuntimeError(
            f"{name}(): could not infer output dtype. {which} dtype must be either a floating "
            f"point or complex dtype. Got: {spelled(dtype)}"
        )


def shifts_bits(name: str, named: Arguments) -> None:
    """Refuse to shift what has no bits."""
    dtype = torch.result_type(named["self"], named["other"])
    if not is_whole(dtype) or dtype == torch.bool:
        raise _missing("lshift" if "left" in name or "lshift" in name else "rshift", dtype)


def divides_by_something(name: str, named: Arguments) -> None:
    """Refuse to divide bools and complex numbers, and integers by what is 0, or wraps to it."""
    tensor, other = named["self"], named["other"]
    if name == "div" and named.get("rounding_mode") is None:
        return
    dtype = torch.result_type(tensor, other)
    if dtype == torch.bool or dtype.is_complex:
        raise _missing(name, dtype)
    if not isinstance(tensor, torch.Tensor) or type(other) not in (int, bool):
        return
    if not is_whole(dtype) or not tensor.numel():
        return
    if not other % 2 ** (8 * dtype.itemsize):
        raise RuntimeError(f"ZeroDivisionError: {name} of {dtype} by {other}")


def bounds_numbers(name: str, named: Arguments) -> None:
    """Refuse no bounds, and to bound bools by Python's bools or by two tensors of them."""
    limits = [limit for key, limit in named.items() if key in ("min", "max") and limit is not None]
    if not limits:
        raise RuntimeError("torch.clamp: At least one of 'min' or 'max' must not be None")
    whole = limits and all(type(limit) is bool for limit in limits)
    tensors = name == "clamp" and len(limits) == 2 and {*map(_dtype, limits)} == {torch.bool}
    if (whole or tensors) and named["self"].dtype == torch.bool:
        raise _missing(name, torch.bool)


def _dtype(limit: Any) -> torch.dtype | None:
    return limit.dtype if isinstance(limit, torch.Tensor) else None


def larger_of_two(name: str, named: Arguments) -> None:
    """Refuse to compare complex numbers by size."""
    if any(isinstance(each, torch.Tensor) and each.is_complex() for each in named.values()):
        raise RuntimeError(f"{name} not implemented for complex tensors.")


def real_pairs(name: str, named: Arguments) -> None:
    """Refuse complex numbers, and whole ones where the result would be none of them."""
    dtype = torch.result_type(named["self"], named["other"])
    if dtype.is_complex or (name in ("hypot", "nextafter") and is_whole(dtype)):
        raise _missing(name, dtype)
