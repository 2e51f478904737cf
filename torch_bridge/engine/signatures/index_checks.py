"""Checks of `x[indices]` by torch's kernels, from shapes and dtypes alone.

Its shape functions let most of this pass, so an error would come when values are computed, in the
read of another tensor.

>>> x, index = torch.zeros(3, device="meta"), torch.tensor([0, 1], device="meta")
>>> check_put("index_put", {"self": x, "indices": [index], "values": torch.ones(5, device="meta")})
Traceback (most recent call last):
...
RuntimeError: shape mismatch: value tensor of shape [5] cannot be broadcast to indexing result of shape [2]
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .shape_checks import spelled

Arguments = dict[str, Any]
_INTEGERS = (torch.int64, torch.int32)
_MASKS = (torch.bool, torch.uint8)


def check_indices(name: str, named: Arguments) -> None:
    """Reject indices that do not go with the tensor, or with each other."""
    indexed_shape(named["self"], named["indices"])


def check_put_dtype(name: str, named: Arguments) -> None:
    """Reject values of another dtype than the tensor's."""
    dtype, values = named["self"].dtype, named["values"].dtype
    if dtype != values:
        raise RuntimeError(
            "Index put requires the source and destination dtypes match, got "
            f"{spelled(dtype)} for the destination and {spelled(values)} for the source."
        )


def check_put(name: str, named: Arguments) -> None:
    """Reject values that cannot be written at some indices."""
    shape, values = indexed_shape(named["self"], named["indices"]), tuple(named["values"].shape)
    pairs = zip(reversed(values), reversed(shape), strict=False)
    fits = all(extent in (1, indexed) or indexed is None for extent, indexed in pairs)
    if len(values) > len(shape) or not fits:
        shown = ["(how many the mask has)" if extent is None else extent for extent in shape]
        raise RuntimeError(
            f"shape mismatch: value tensor of shape {list(values)} cannot be broadcast to indexing "
            f"result of shape [{', '.join(map(str, shown))}]"
        )


def indexed_shape(tensor: torch.Tensor, indices: Any) -> list[int | None]:
    """The shape of `tensor[indices]`; an axis is None where a mask decides how long it is.

    Raises:
        IndexError: an index is of no integer dtype, there are too many, a mask has another shape
            than what it is of, or index arrays do not broadcast.
    """
    shape: list[int | None] = []  # the axes without an index, and None for the indexed ones
    arrays: list[torch.Size | None] = []  # None: of a mask
    axis = 0
    for position, index in enumerate(indices):
        if index is None or index.dtype in _INTEGERS:
            rank = 1
        elif index.dtype in _MASKS:
            rank = index.dim()
        else:
            raise IndexError("tensors used as indices must be long, int, byte or bool tensors")
        if axis + rank > tensor.dim():
            raise IndexError(f"too many indices for tensor of dimension {tensor.dim()}")
        if index is None:
            shape.append(tensor.shape[axis])
        elif index.dtype in _MASKS:
            _check_mask(tensor, index, axis, position)
            arrays.append(None)
            shape.append(None)
        else:
            if index.numel() and not tensor.shape[axis]:
                raise IndexError("index is out of bounds for dimension with size 0")
            arrays.append(index.shape)
            shape.append(None)
        axis += rank
    shape += tensor.shape[axis:]
    broadcast = _broadcast(arrays)
    indexed = [axis for axis, extent in enumerate(shape) if extent is None]
    if not indexed:
        return shape
    first = indexed[0] if indexed[-1] - indexed[0] == len(indexed) - 1 else 0
    rest: list[int | None] = [extent for extent in shape if extent is not None]
    return rest[:first] + broadcast + rest[first:]


def _check_mask(tensor: torch.Tensor, mask: torch.Tensor, axis: int, position: int) -> None:
    for mask_axis, extent in enumerate(mask.shape):
        if extent != tensor.shape[axis + mask_axis]:
            raise IndexError(
                f"The shape of the mask {list(mask.shape)} at index {mask_axis} does not match the "
                f"shape of the indexed tensor {list(tensor.shape)} at index {axis + mask_axis}"
            )


def _broadcast(arrays: list[torch.Size | None]) -> list[int | None]:
    """The common shape of index arrays; that of a mask is one axis, as long as it has elements."""
    shapes = [shape for shape in arrays if shape is not None]
    try:
        common: list[int | None] = list(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        raise IndexError(
            "shape mismatch: indexing tensors could not be broadcast together with shapes "
            f"{', '.join(str(list(shape)) for shape in shapes)}"
        ) from None
    if len(shapes) == len(arrays):
        return common
    return [*common[:-1], None]


CHECKS: dict[str, tuple[Callable[[str, Arguments], None], ...]] = {
    "index": (check_indices,),
    **dict.fromkeys(("index_put", "index_put_impl"), (check_put, check_put_dtype)),
}
"""The checks of an operator, by its name without underscores."""
