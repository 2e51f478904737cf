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


def _lower_triangle(sample: SampleInput, out: Any) -> Any:
    """A packed factor, of which only the lower triangle means something."""
    packed, *rest = out
    return packed.tril(), *rest


def _place_of_value(sample: SampleInput, out: Any) -> Any:
    """`(values, indices)`: the values, and what stands at the indices, which equals share."""
    values, indices = out
    dim = sample.kwargs.get("dim", sample.args[1] if len(sample.args) > 1 else -1)
    keepdim = sample.kwargs.get("keepdim", sample.args[2] if len(sample.args) > 2 else False)
    if sample.input.dim() == 0:
        return values, indices
    places = indices if keepdim else indices.unsqueeze(dim)
    return values, sample.input.gather(dim, places)


_SETTLED: dict[str, Callable[[SampleInput, Any], Any]] = {
    "svd_lowrank": _low_rank,
    "pca_lowrank": _low_rank,
    "linalg.eigh": _eigen,
    "linalg.ldl_factor": _lower_triangle,
    "linalg.ldl_factor_ex": _lower_triangle,
    "kthvalue": _place_of_value,
}
