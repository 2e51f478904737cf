"""Results that torch leaves open: random and uninitialised values, signs, and places of equals.

`settled` brings such results to a form in which two right answers are equal: singular vectors
become the matrix they stand for, places among equal elements become the elements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

_UNINITIALISED = frozenset(
    {
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
    }
)


def is_uninitialised(info: OpInfo) -> bool:
    """Whether an entry's values are whatever the memory held."""
    return info.name in _UNINITIALISED


def only_form(want: Any, got: list[Any], uninitialised: bool) -> str | None:
    """Compare shapes and types, and that the same seed gave the same numbers; or what differs."""
    from .compare import first_difference

    forms = [pytree.tree_map_only(torch.Tensor, torch.zeros_like, out) for out in (want, got[0])]
    fault = first_difference(forms[0], forms[1])
    if fault or uninitialised or len(got) < 2:
        return fault
    fault = first_difference(got[0], got[1])
    return f"the same seed gave other numbers: {fault}" if fault else None


def settled(info: OpInfo, sample: SampleInput, out: Any, gradient: bool) -> Any:
    """The result of an entry in a form that is the same for every right answer.

    Args:
        info: the entry.
        sample: on the CPU.
        out: the result, on the CPU.
        gradient: `out` are gradients, which the database's samples have settled already.
    """
    settle = _SETTLED.get(info.name)
    return out if settle is None or gradient else settle(sample, out)


def _low_rank(sample: SampleInput, out: Any) -> Any:
    """`(u, s, v)` of a matrix of that rank: the singular values, and the matrix itself."""
    u, s, v = out
    return s, u @ torch.diag_embed(s) @ v.mH


def _eigen(sample: SampleInput, out: Any) -> Any:
    """`(values, vectors)` of a Hermitian matrix: the values, and the matrix itself."""
    values, vectors = out
    return values, (vectors * values.unsqueeze(-2)) @ vectors.mH


def _eigen_of_any(sample: SampleInput, out: Any) -> Any:
    """`(values, vectors)` of a matrix: vectors have any phase, so the matrix in their place."""
    values, vectors = out
    if not vectors.numel():
        return out
    return values, vectors @ torch.diag_embed(values) @ torch.linalg.inv(vectors)


def _lower_triangle(sample: SampleInput, out: Any) -> Any:
    """A packed factor, of which only the lower triangle means something."""
    packed, *rest = out
    return packed.tril(), *rest


def _places(number: int) -> Callable[[SampleInput, Any], Any]:
    """Settle `(values, indices)`: the values, and what stands at the indices, which equals share.

    Args:
        number: place of the operator's `dim` among the arguments after the input.
    """

    def settle(sample: SampleInput, out: Any) -> Any:
        values, indices = out
        dim = _argument(sample, number, "dim", -1)
        if sample.input.dim() == 0 or _argument(sample, -1, "stable", False):
            return values, indices
        if indices.dim() < sample.input.dim():
            indices = indices.unsqueeze(dim)
        return values, sample.input.detach().gather(dim, indices)

    return settle


def _order(sample: SampleInput, out: Any) -> Any:
    """The places of the sorted elements: the elements, unless equals have an order too."""
    if sample.input.dim() == 0 or _argument(sample, -1, "stable", False):
        return out
    return sample.input.detach().gather(_argument(sample, 0, "dim", -1), out)


def _argument(sample: SampleInput, number: int, name: str, default: Any) -> Any:
    if name in sample.kwargs:
        return sample.kwargs[name]
    return sample.args[number] if 0 <= number < len(sample.args) else default


def _float_statistics(sample: SampleInput, out: Any) -> Any:
    """`(result, mean, rstd)`: torch keeps the statistics in float32 on some of its devices."""
    result, *statistics = out
    return result, *(leaf.float() for leaf in statistics)


_SETTLED: dict[str, Callable[[SampleInput, Any], Any]] = {
    "svd_lowrank": _low_rank,
    "pca_lowrank": _low_rank,
    "linalg.eigh": _eigen,
    "linalg.eig": _eigen_of_any,
    "linalg.ldl_factor": _lower_triangle,
    "linalg.ldl_factor_ex": _lower_triangle,
    "kthvalue": _places(1),
    "topk": _places(1),
    "sort": _places(0),
    "argsort": _order,
    "native_layer_norm": _float_statistics,
    "native_batch_norm": _float_statistics,
    "_native_batch_norm_legit": _float_statistics,
    "_batch_norm_with_update": _float_statistics,
}
