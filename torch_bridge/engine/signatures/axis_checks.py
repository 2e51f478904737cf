"""What torch's kernels refuse of the axes that an operator reduces, or goes along.

Its shape functions let this pass, or raise another error.

>>> import torch
>>> distinct_axes("sum", {"self": torch.zeros(2, 3, device="meta"), "dim": [0, -2]})
Traceback (most recent call last):
...
RuntimeError: dim 0 appears multiple times in the list of dims
"""

from __future__ import annotations

import itertools
from typing import Any

from .kernel_checks import first_tensor

Arguments = dict[str, Any]


def axis_exists(name: str, named: Arguments) -> None:
    """Refuse an axis that a tensor does not have."""
    rank, dim = max(first_tensor(named).dim(), 1), named.get("dim", -1)
    if not -rank <= dim < rank:
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-rank}, {rank - 1}], but got "
            f"{dim})"
        )


def axis_of_number(name: str, named: Arguments) -> None:
    """Refuse another axis of a number than its only one."""
    dim = named["dim"]
    if not named["self"].dim() and dim not in (0, -1):
        raise IndexError(f"{name}(): Expected reduction dim -1 or 0 for scalar but got {dim}")


def distinct_axes(name: str, named: Arguments) -> None:
    """Refuse an axis that is listed twice."""
    rank, dims = max(first_tensor(named).dim(), 1), named.get("dim")
    if isinstance(dims, list | tuple):
        seen: set[int] = set()
        for dim in itertools.takewhile(lambda dim: -rank <= dim < rank, dims):
            if dim % rank in seen:
                raise RuntimeError(f"dim {dim % rank} appears multiple times in the list of dims")
            seen.add(dim % rank)


def not_empty(name: str, named: Arguments) -> None:
    """Refuse to look for one of no elements, along the axes that are reduced."""
    tensor, dims = first_tensor(named), named.get("dim")
    if tensor.numel():
        return
    if dims is None or dims in ([], ()):
        kind = IndexError if name.startswith("arg") else RuntimeError
        raise kind(
            f"{name}(): Expected reduction dim to be specified for input.numel() == 0. Specify the "
            "reduction dim with the 'dim' argument."
        )
    for dim in dims if isinstance(dims, list | tuple) else (dims,):
        if -tensor.dim() <= dim < tensor.dim() and tensor.shape[dim] == 0:
            place = dim % tensor.dim()
            raise IndexError(f"{name}(): Expected reduction dim {place} to have non-zero size.")


def not_empty_axis(name: str, named: Arguments) -> None:
    """Refuse to look for one of no elements along an axis; of no axis there is one."""
    if named.get("dim") is not None:
        not_empty(name.removeprefix("nan"), named)
