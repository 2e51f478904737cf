"""What torch's kernels refuse of indices from shapes and dtypes alone.

Its shape functions let most of this pass, so an error would come when values are computed, in the
read of another tensor.

>>> x, places = torch.zeros(3, device="meta"), torch.tensor([0, 1], device="meta")
>>> put_fits("index_put", {"self": x, "indices": [places], "values": torch.ones(5, device="meta")})
Traceback (most recent call last):
...
RuntimeError: shape mismatch: value tensor of shape [5] cannot be broadcast to indexing result of shape [2]
"""  # noqa: E501

from __future__ import annotations

from typing import Any

import torch

Arguments = dict[str, Any]
_INTEGERS = (torch.int64, torch.int32)
_LONG_ONLY = ("index_copy", "index_fill")
_MASKS = (torch.bool, torch.uint8)


def indexes_fit(name: str, named: Arguments) -> None:
    """Refuse indices that do not go with the tensor, or with each other."""
    indexed_shape(named["self"], named["indices"])


def put_fits(name: str, named: Arguments) -> None:
    """Refuse values that cannot be written at some indices."""
    want, values = indexed_shape(named["self"], named["indices"]), tuple(named["values"].shape)
    pairs = zip(reversed(values), reversed(want), strict=False)
    fits = all(have in (1, place) or place is None for have, place in pairs)
    if len(values) > len(want) or not fits:
        shown = ["(how many the mask has)" if place is None else place for place in want]
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
    kept: list[int | None] = []  # the axes that no index is of, and None for the indexed ones
    arrays: list[torch.Size | None] = []  # None: of a mask
    axis = 0
    for number, index in enumerate(indices):
        if index is None:
            wanted = 1
        elif index.dtype in _MASKS:
            wanted = index.dim()
        elif index.dtype in _INTEGERS:
            wanted = 1
        else:
            raise IndexError("tensors used as indices must be long, int, byte or bool tensors")
        if axis + wanted > tensor.dim():
            raise IndexError(f"too many indices for tensor of dimension {tensor.dim()}")
        if index is None:
            kept.append(tensor.shape[axis])
        elif index.dtype in _MASKS:
            _same_shape(tensor, index, axis, number)
            arrays.append(None)
            kept.append(None)
        else:
            if index.numel() and not tensor.shape[axis]:
                raise IndexError("index is out of bounds for dimension with size 0")
            arrays.append(index.shape)
            kept.append(None)
        axis += wanted
    kept += tensor.shape[axis:]
    together = _broadcast(arrays)
    places = [place for place, extent in enumerate(kept) if extent is None]
    if not places:
        return kept
    first = places[0] if places[-1] - places[0] == len(places) - 1 else 0
    rest: list[int | None] = [extent for extent in kept if extent is not None]
    return rest[:first] + together + rest[first:]


def _same_shape(tensor: torch.Tensor, mask: torch.Tensor, axis: int, number: int) -> None:
    for place, extent in enumerate(mask.shape):
        if extent != tensor.shape[axis + place]:
            raise IndexError(
                f"The shape of the mask {list(mask.shape)} at index {place} does not match the "
                f"shape of the indexed tensor {list(tensor.shape)} at index {axis + place}"
            )


def _broadcast(arrays: list[torch.Size | None]) -> list[int | None]:
    """The common shape of index arrays; that of a mask is one axis, as long as it has elements."""
    known = [shape for shape in arrays if shape is not None]
    try:
        common: list[int | None] = list(torch.broadcast_shapes(*known))
    except RuntimeError:
        raise IndexError(
            "shape mismatch: indexing tensors could not be broadcast together with shapes "
            f"{', '.join(str(list(shape)) for shape in known)}"
        ) from None
    if len(known) == len(arrays):
        return common
    return [*common[:-1], None]


def reads_something(name: str, named: Arguments) -> None:
    """Refuse places along an axis, or in a tensor, that has none."""
    tensor, index = named["self"], named["index"]
    if not index.numel():
        return
    if name == "take":
        if not tensor.numel():
            raise IndexError("take(): tried to take from an empty tensor")
        return
    dim = named["dim"]
    if tensor.dim() and -tensor.dim() <= dim < tensor.dim() and not tensor.shape[dim]:
        raise RuntimeError(
            f"{name}(): index is out of bounds for dimension {dim % tensor.dim()} with size 0"
        )


def source_fits(name: str, named: Arguments) -> None:
    """Refuse slices to add of another shape than those they are added to."""
    target, source, dim = named["self"], named["source"], named["dim"]
    have, want = list(source.shape), list(target.shape)
    dim = dim % len(want) if want else 0
    if len(have) != len(want) or have[:dim] + have[dim + 1 :] != want[:dim] + want[dim + 1 :]:
        raise RuntimeError(
            "source tensor shape must match self tensor shape, excluding the specified dimension. "
            f"Got self.shape = {want} source.shape = {have}"
        )


def list_of_places(name: str, named: Arguments) -> None:
    """Refuse places along an axis that are no list of integers, or not as many as slices."""
    tensor, index, dim = named["self"], named["index"], named["dim"]
    wanted = (torch.int64,) if name in _LONG_ONLY else _INTEGERS
    if index.dtype not in wanted:
        kind = IndexError if name == "index_fill" else RuntimeError
        names = "/".join(str(dtype).removeprefix("torch.") for dtype in reversed(wanted))
        raise kind(f"{name}(): Expected dtype {names} for index but got: {index.dtype}")
    if index.dim() > 1:
        kind = RuntimeError if name == "index_fill" else IndexError
        raise kind(
            f"{name}(): Index is supposed to be a vector, but got dim: {index.dim()} and size: "
            f"{list(index.shape)}"
        )
    if name == "index_select" and not tensor.dim() and index.numel() != 1:
        raise RuntimeError(
            f"index_select(): Index to scalar can have only 1 value, got {index.numel()} value(s)"
        )
    source = named.get("source")
    if isinstance(source, torch.Tensor):
        have = source.shape[dim] if source.dim() else 1
        if source.dim() <= max(dim, -dim - 1) and source.dim():
            return
        if index.numel() != have:
            kind = IndexError if name == "index_copy" else RuntimeError
            raise kind(
                f"{name}(): Number of indices ({index.numel()}) should be equal to "
                f"source.size(dim) ({have})"
            )


def real_fill(name: str, named: Arguments) -> None:
    """Refuse a complex number to fill real ones with."""
    tensor, value = named["self"], named["value"]
    complex_ = isinstance(value, torch.Tensor) and value.is_complex()
    if complex_ and not tensor.is_complex():
        raise RuntimeError(
            f"{name}_(): Converting complex Scalar to non-complex type is not supported: "
            f"{value.dtype} to {tensor.dtype}"
        )


def elements_to_put(name: str, named: Arguments) -> None:
    """Refuse places in a tensor that are no integers, or not as many as there are values."""
    tensor, index, source = named["self"], named["index"], named["source"]
    if index.dtype != torch.int64:
        raise RuntimeError(f"put_(): Expected a long tensor for index, but got {index.dtype}")
    if source.numel() != index.numel():
        raise IndexError(
            "put_(): Expected source and index to have the same number of elements, but got "
            f"source.numel() = {source.numel()}, index.numel() = {index.numel()}"
        )
    if index.numel() and not tensor.numel():
        raise IndexError("put_(): Tried to put elements into an empty tensor")
