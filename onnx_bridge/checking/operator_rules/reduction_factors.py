"""Operators that combine the elements along an axis.

A sum over a split axis is a local sum and then one across devices, which every device gets.
"""

from __future__ import annotations

from isoshard.onnx_bridge.checking.factors import (
    EXTENSION,
    FORMALISM,
    Axes,
    Factors,
    Site,
    named,
    rule,
)

SUMS = [
    f"Reduce{kind}" for kind in "L1 L2 LogSum LogSumExp Max Mean Min Prod Sum SumSquare".split()
]


@rule(*SUMS)
def reduce(site: Site) -> Factors:
    """The remaining axes keep their factor; one that is kept with size 1 has none."""
    rank = len(site.shape(0))
    axes = site.axes(1, rank)
    if not axes and not site.int_attribute("noop_with_empty_axes", 0):
        axes = list(range(rank))
    keep = site.int_attribute("keepdims", 1)
    return _reduced(site, rank, axes, keep, FORMALISM)


@rule("ArgMax", "ArgMin")
def position(site: Site) -> Factors:
    """As a sum; the index of the largest element counts over all shards."""
    rank = len(site.shape(0))
    axis = site.axis(0, rank)
    return _reduced(site, rank, [axis], site.int_attribute("keepdims", 1), EXTENSION)


@rule("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
def global_pool(site: Site) -> Factors:
    """A sum over all axes but batch and channels; the others are kept with size 1."""
    rank = len(site.shape(0))
    return _reduced(site, rank, list(range(2, rank)), 1, EXTENSION)


def _reduced(site: Site, rank: int, axes: list[int], keep: int, basis: str) -> Factors:
    names = named("a", rank)
    names_out: list[str | None] = []
    for axis, name in enumerate(names):
        if axis not in axes:
            names_out.append(name)
        elif keep:
            names_out.append(None)
    inputs: list[Axes | None] = [names, *(None,) * (len(site.node.inputs) - 1)]
    return Factors(tuple(inputs), (tuple(names_out),), basis)


@rule("Softmax", "LogSoftmax", "LpNormalization", "Hardmax")
def softmax(site: Site) -> Factors:
    """The result is sharded as the input; sums along the axis cross its shards."""
    names = named("a", len(site.shape(0)))
    old = site.graph.opsets.get("", 1) < 13 and site.node.op_type != "LpNormalization"
    axis = site.axis(1 if old else -1, len(names))
    reduced_axes = names[axis:] if old else (names[axis],)
    return Factors((names,), (names,), EXTENSION, inside=frozenset(reduced_axes))


@rule("LayerNormalization", "RMSNormalization")
def layer_norm(site: Site) -> Factors:
    """As softmax, along the last axes; scale and bias have those axes only."""
    names = named("a", len(site.shape(0)))
    axis = site.axis(-1, len(names))
    inputs: list[Axes | None] = [names]
    for shape in site.inputs[1:]:
        inputs.append(None if shape is None else names[max(0, len(names) - len(shape)) :])
    leading = (*names[:axis], *(None,) * (len(names) - axis))  # mean and deviation
    outputs = (names, *(leading,) * (len(site.node.outputs) - 1))
    return Factors(tuple(inputs), outputs, EXTENSION, inside=frozenset(names[axis:]))


@rule("CumSum", "TopK")
def along_axis(site: Site) -> Factors:
    """Other axes may be split; the axis of the operator is gathered."""
    names = named("a", len(site.shape(0)))
    if site.node.op_type == "CumSum":
        axes = [site.within(axis, len(names)) for axis in site.constant(1)]
    else:
        axes = [site.axis(-1, len(names))]
    inputs: tuple[Axes | None, ...] = (names, *(None,) * (len(site.node.inputs) - 1))
    outputs = (names,) * len(site.node.outputs)
    return Factors(inputs, outputs, EXTENSION, unsplit=frozenset(names[axis] for axis in axes))


@rule("Det")
def determinant(site: Site) -> Factors:
    """Each matrix is on one device; stacks of them may be split."""
    names = named("a", len(site.shape(0)))
    return Factors((names,), (names[:-2],), EXTENSION, unsplit=frozenset(names[-2:]))
