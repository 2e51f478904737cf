"""Convolutions, pooling and normalisation over channels: not supported by the proposal.

Space may be split: neighbours exchange the borders that a window reaches over.
"""

from __future__ import annotations

from isoshard.onnx_bridge.checking.factors import EXTENSION, Axes, Factors, Site, Unfit, named, rule


@rule("Conv", "ConvInteger")
def convolution(site: Site) -> Factors:
    """(batch, c, ..) and (o, c, ..) to (batch, o, ..); with groups, c and o go together."""
    rank = len(site.shape(0))
    space, window = named("s", rank - 2), named("window", rank - 2)
    groups = site.int_attribute("group", 1)
    channels = "o" if groups > 1 else "c"
    x: Axes = ("batch", channels, *space)
    weight: Axes = ("o", None if groups > 1 else "c", *window)
    others: list[Axes | None] = [None] * (len(site.node.inputs) - 2)
    if others and site.node.op_type == "Conv":
        others[0] = ("o",)
    limits = {"o": groups} if groups > 1 else {}
    return Factors(
        (x, weight, *others),
        (("batch", "o", *space),),
        EXTENSION,
        unsplit=frozenset(window),
        inside=frozenset(space),
        limits=limits,
    )


@rule("MaxPool", "AveragePool", "LpPool")
def pool(site: Site) -> Factors:
    """Batch and channels are unchanged."""
    names = named("a", len(site.shape(0)))
    outputs = (names,) * len(site.node.outputs)
    return Factors((names,), outputs, EXTENSION, inside=frozenset(names[2:]))


@rule("BatchNormalization", "InstanceNormalization", "GroupNormalization")
def channel_norm(site: Site) -> Factors:
    """Scale, bias and statistics go with the channels."""
    names = named("a", len(site.shape(0)))
    if len(names) < 2:
        raise Unfit("its input has no channels")
    reduced_axes = {"BatchNormalization": (), "InstanceNormalization": names[2:]}
    inside = reduced_axes.get(site.node.op_type, names[1:])
    others = ((names[1],),) * (len(site.node.inputs) - 1)
    outputs = (names, *(None,) * (len(site.node.outputs) - 1))
    return Factors((names, *others), outputs, EXTENSION, inside=frozenset(inside))
