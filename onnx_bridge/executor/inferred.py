"""Shardings that the formalism infers for values without an annotation.

The compiler may lay such values out as it likes. By `inferred` they are sharded as proposal 0007
says: as the operator makes them from inputs that are sharded as they do, and whole where nothing is
split.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
from jax.sharding import NamedSharding

from isoshard.core.kit import Tiles, named_sharding

from ..checking.placement import Placement
from ..checking.semantics import Check
from ..errors import AnnotationError
from ..layouts.meshes import NumberedMesh
from ..layouts.shardings import sharding_over
from ..reading.layout import ModelLayout


def with_inferred(model_layout: ModelLayout) -> ModelLayout:
    """Say the layout of every result that can be inferred.

    Returns:
        The same with the inferred layouts added. Left open are values of which nothing can be
        inferred, and, with a note each, those whose layout no NamedSharding over their stage is.
    """
    graph, configuration = model_layout.graph, model_layout.configuration
    check = Check(graph, configuration.name, configuration.num_devices, set())
    check.run()
    shardings, notes = dict(model_layout.shardings), list(model_layout.notes)
    for stage in model_layout.stages:
        over = NumberedMesh(stage.mesh, model_layout.devices[stage.number])
        for index in stage.nodes:
            for name in filter(None, graph.nodes[index].outputs):
                shape = graph.shape(name)
                if (index, name) in shardings or shape is None:
                    continue
                if name in check.results and check.results[name] is None:
                    continue
                try:
                    placement = check.results.get(name)
                    shardings[index, name] = _sharding(placement, over, shape, name)
                except AnnotationError as error:
                    notes.append(f"{error}; its layout is left to the compiler")
    return dataclasses.replace(model_layout, shardings=shardings, notes=tuple(notes))


def _sharding(
    placement: Placement | None, over: NumberedMesh, shape: tuple[int | str | None, ...], name: str
) -> NamedSharding:
    if placement is None:
        return named_sharding(jax.P(), over.mesh, len(shape))
    blocks: dict[tuple[int, ...], list[int]] = {}
    for device, block in placement.holds.items():
        blocks.setdefault(block, []).append(device)
    sizes = {len(devices) for devices in blocks.values()}
    uneven = [
        size
        for size, count in zip(shape, placement.counts, strict=True)
        if isinstance(size, int) and size % count
    ]
    if len(sizes) != 1 or len(blocks) != np.prod(placement.counts, dtype=int) or uneven:
        raise AnnotationError(f"inferred is {placement}, which are no equal blocks", tensor=name)
    grid = np.empty((*placement.counts, *sizes), np.int64)
    for block, devices in blocks.items():
        grid[block] = sorted(devices)
    return sharding_over(over, Tiles(grid, int(grid.max()) + 1), name)
