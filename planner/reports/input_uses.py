"""What a step takes, summed up: how much of each role is split along which axes, and could be."""

from __future__ import annotations

from collections.abc import Sequence

from jax.sharding import NamedSharding

from isoshard.core.traced.traced_step import StepInput

from .findings import InputUse

Group = tuple[str, str, tuple[str, ...], tuple[str, ...]]


def input_uses(inputs: Sequence[StepInput]) -> tuple[InputUse, ...]:
    """Sum up the inputs of a step.

    Args:
        inputs: as a `TracedStep` has them.

    Returns:
        One entry for each role, dtype and way of being split, the largest first.

    Example:
        >>> import numpy as np
        >>> from jax.sharding import PartitionSpec as P
        >>> from isoshard.planner.machine.topologies import topology
        >>> mesh = topology("v5e:4x4").mesh((4, 4), ("data", "model"))
        >>> layout = NamedSharding(mesh, P(None, "model"))
        >>> up = StepInput("up", "parameter", (512, 512), np.dtype("float32"), layout)
        >>> input_uses([up, up])
        (InputUse(role='parameter', dtype='float32', axes=('model',), free=('data',), \
bytes=524288, count=2),)
    """
    groups: dict[Group, list[int]] = {}
    for one in inputs:
        axes = _splitting(one.sharding)
        group = (one.role, one.dtype.name, axes, _free(one, axes))
        groups.setdefault(group, []).append(one.bytes_per_device)
    uses = [InputUse(*group, sum(sizes), len(sizes)) for group, sizes in groups.items()]
    return tuple(sorted(uses, key=lambda use: -use.bytes))


def _splitting(layout: NamedSharding) -> tuple[str, ...]:
    named: set[str] = set()
    for entry in layout.spec:
        if isinstance(entry, str):
            named.add(entry)
        elif isinstance(entry, tuple):
            named.update(entry)
    return tuple(name for name, size in layout.mesh.shape.items() if name in named and size > 1)


def _free(one: StepInput, axes: tuple[str, ...]) -> tuple[str, ...]:
    shard = one.sharding.shard_shape(one.shape)
    return tuple(
        name
        for name, size in one.sharding.mesh.shape.items()
        if size > 1 and name not in axes and any(n and n % size == 0 for n in shard)
    )
