"""Operators that move elements without computing: none of them is in the proposal."""

from __future__ import annotations

import math

from isoshard.onnx_bridge.checking.factors import (
    EXTENSION,
    Axes,
    Dims,
    Factors,
    Site,
    Unfit,
    broadcast,
    named,
    rule,
)


@rule("Shape", "Size", "Range", "Constant", "ConstantOfShape", "EyeLike", "NonZero", "OneHot")
def free(site: Site) -> Factors:
    """Inputs may have any sharding, and nothing follows for the result."""
    return Factors((None,) * len(site.node.inputs), (None,) * len(site.node.outputs), EXTENSION)


@rule("Transpose")
def transpose(site: Site) -> Factors:
    """Axes change places."""
    names = named("a", len(site.shape(0)))
    order = site.int_list("perm") or list(range(len(names)))[::-1]
    if sorted(order) != list(range(len(names))):
        raise Unfit(f"its perm is no order of {len(names)} axes")
    return Factors((names,), (tuple(names[axis] for axis in order),), EXTENSION)


@rule("Reshape", "Flatten", "Squeeze", "Unsqueeze")
def reshape(site: Site) -> Factors:
    """Where axes are merged or divided, the first of each side may be split."""
    inputs, outputs, limits, unsplit = regrouped(site.shape(0), site.result(0))
    others = (None,) * (len(site.node.inputs) - 1)
    return Factors((inputs, *others), (outputs,), EXTENSION, frozenset(unsplit), limits=limits)


def regrouped(before: Dims, after: Dims) -> tuple[Axes, Axes, dict[str, int], set[str]]:
    """Factors of a reshape.

    Args:
        before: shape; a size, a symbol or None per axis.
        after: likewise.

    Example:
        >>> regrouped(("n", 6, 8), ("n", 6, 2, 4))
        (('g0', 'g1', 'g2'), ('g0', 'g1', 'g2', None), {'g2': 2}, set())
        >>> regrouped((2, 3, 8), (6, 8))
        (('g0', 'w1', 'g2'), ('g0', 'g2'), {'g0': 2}, {'w1'})
    """
    inputs: list[str | None] = []
    outputs: list[str | None] = []
    limits: dict[str, int] = {}
    unsplit: set[str] = set()
    i = j = 0
    while i < len(before) or j < len(after):
        first, start = i, j
        name = f"g{i}" if i < len(before) else f"h{j}"
        if i < len(before) and j < len(after) and _same(before[i], after[j]):
            inputs.append(name)
            outputs.append(name)
            i, j = i + 1, j + 1
            continue
        if i < len(before) and before[i] == 1:
            inputs.append(None)
            i += 1
            continue
        if j < len(after) and after[j] == 1:
            outputs.append(None)
            j += 1
            continue
        i, j = _next_boundary(before, after, i, j)
        group, new_group = list(range(first, i)), list(range(start, j))
        lead = next((axis for axis in group if before[axis] != 1), None)
        head = next((axis for axis in new_group if after[axis] != 1), None)
        for axis in group:
            inputs.append(name if axis == lead else f"w{axis}" if before[axis] != 1 else None)
            if before[axis] != 1 and axis != lead:
                unsplit.add(f"w{axis}")
        outputs += [name if axis == head else None for axis in new_group]
        if lead is not None and head is not None:
            sizes = (before[lead], after[head])
            static_sizes = [size for size in sizes if isinstance(size, int)]
            limits[name] = math.gcd(*static_sizes) if len(static_sizes) == 2 else 1
    return tuple(inputs), tuple(outputs), limits, unsplit


def _same(a: int | str | None, b: int | str | None) -> bool:
    return a is not None and a == b


def _next_boundary(before: Dims, after: Dims, i: int, j: int) -> tuple[int, int]:
    """The least ends of axes on both sides that hold as many elements; the ends if unknown."""
    left = right = 1
    while True:
        if left == right and (left > 1 or (i == len(before) and j == len(after))):
            return i, j
        if i < len(before) and (left <= right or j == len(after)):
            size, i = before[i], i + 1
            left = left * size if isinstance(size, int) else 0
        elif j < len(after):
            size, j = after[j], j + 1
            right = right * size if isinstance(size, int) else 0
        else:
            return len(before), len(after)
        if left == 0 or right == 0:
            return len(before), len(after)


@rule("Expand")
def expand(site: Site) -> Factors:
    """Axes of size 1 grow: they are broadcast."""
    (axes, _), result = broadcast([site.shape(0), site.result(0)])
    return Factors((axes, None), (result,), EXTENSION)


@rule("Concat")
def concat(site: Site) -> Factors:
    """The axis along which they are joined is gathered; the others go together."""
    names = list(named("a", len(site.shape(0))))
    axis = site.axis(1, len(names))
    inputs = [
        (*names[:axis], f"part{index}", *names[axis + 1 :]) for index in range(len(site.inputs))
    ]
    result = tuple(None if at == axis else name for at, name in enumerate(names))
    unsplit = frozenset(f"part{index}" for index in range(len(site.inputs)))
    return Factors(tuple(inputs), (result,), EXTENSION, unsplit)


@rule("Split")
def split(site: Site) -> Factors:
    """The axis that is divided is gathered."""
    return _sliced(site, [site.axis(0, len(site.shape(0)))])


@rule("Slice")
def slice_(site: Site) -> Factors:
    """The axes that are cut are gathered."""
    rank = len(site.shape(0))
    return _sliced(site, site.axes(3, rank) or list(range(rank)))


@rule("Pad")
def pad(site: Site) -> Factors:
    """The axes that grow are gathered."""
    rank = len(site.shape(0))
    pads = site.int_list("pads") or site.constant(1)
    if len(pads) != 2 * rank or site.has(3):
        raise Unfit("it does not pad every axis")
    return _sliced(site, [axis for axis in range(rank) if pads[axis] or pads[axis + rank]])


@rule("Gather")
def gather(site: Site) -> Factors:
    """The indices' axes take the place of the one looked up; each device looks up what it has."""
    names, index_names = named("a", len(site.shape(0))), named("i", len(site.shape(1)))
    axis = site.axis(0, len(names))
    result = (*names[:axis], *index_names, *names[axis + 1 :])
    return Factors((names, index_names), (result,), EXTENSION)


def _sliced(site: Site, axes: list[int]) -> Factors:
    names = named("a", len(site.shape(0)))
    result = tuple(None if axis in axes else name for axis, name in enumerate(names))
    others = (None,) * (len(site.node.inputs) - 1)
    unsplit = frozenset(names[axis] for axis in axes)
    return Factors((names, *others), (result,) * len(site.node.outputs), EXTENSION, unsplit)
