"""Staging: the pipeline stages a user names, and the devices of each.

>>> from isoshard.core.layout.mesh import make_mesh
>>> parts, record = stage_submeshes(make_mesh((2, 2), ("data", "model")), [0, 1], "stage")
>>> {stage: over.device_ids for stage, over in parts.items()}
{0: (0, 1, 2, 3), 1: (4, 5, 6, 7)}
>>> parts, _ = stage_submeshes(make_mesh((2, 2), ("model", "stage")), [0, 1], "stage")
>>> {stage: over.device_ids for stage, over in parts.items()}
{0: (0, 2), 1: (1, 3)}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jax.sharding import Mesh

from isoshard.core.kit import check_patterns, describe_mesh, listed, matches
from isoshard.onnx_bridge.errors import AnnotationError
from isoshard.onnx_bridge.layouts.meshes import NumberedMesh, submesh
from isoshard.onnx_bridge.reading.graph import Graph, Node
from isoshard.onnx_bridge.reading.mesh_record import MeshRecord

from .weight_layouts import modules_around

Stages = Mapping[str, int] | Callable[[Node], int | None]


def declared_stages(graph: Graph, stages: Stages | None) -> dict[int, int | None]:
    """Ask for the stage of every node.

    Raises:
        AnnotationError: a pattern fits no node, no node gets a stage, or one is no integer.
        PlanError: a pattern is malformed.
    """
    if stages is None:
        return {}
    if callable(stages):
        stage_of = {node.index: stages(node) for node in graph.nodes}
    else:
        stage_of = _by_pattern(graph, stages)
    wrong = [
        f"node {graph.nodes[index].name!r} gets {stage!r}"
        for index, stage in stage_of.items()
        if stage is not None and (isinstance(stage, bool) or not isinstance(stage, int))
    ]
    if wrong or not any(stage is not None for stage in stage_of.values()):
        reason = "; ".join(wrong) or "no node gets one"
        raise AnnotationError(f"stages are integers for nodes: {reason}")
    return stage_of


def stage_submeshes(
    mesh: Mesh, stages: Sequence[int], stage_axis: str
) -> tuple[dict[int, NumberedMesh], MeshRecord]:
    """Give each stage its devices."""
    axes = tuple(mesh.shape.items())
    if len(stages) == 1:
        devices = tuple(range(mesh.size))
        return {stages[0]: NumberedMesh(mesh, devices)}, MeshRecord(axes)
    if stage_axis not in mesh.shape:
        submeshes = {
            stage: NumberedMesh(mesh, tuple(range(at * mesh.size, (at + 1) * mesh.size)))
            for at, stage in enumerate(stages)
        }
        return submeshes, MeshRecord(((stage_axis, len(stages)), *axes), stage_axis)
    if mesh.shape[stage_axis] != len(stages):
        raise AnnotationError(
            f"there are {len(stages)} stages, {', '.join(map(str, stages))}, and the mesh "
            f"{describe_mesh(mesh)} has room for {mesh.shape[stage_axis]} along {stage_axis!r}; "
            "make them as many"
        )
    grid = np.arange(mesh.size).reshape(mesh.devices.shape)
    rows = np.moveaxis(grid, mesh.axis_names.index(stage_axis), 0)
    submeshes = {
        stage: submesh(mesh, row.ravel().tolist()) for stage, row in zip(stages, rows, strict=True)
    }
    return submeshes, MeshRecord(axes, stage_axis)


def _by_pattern(graph: Graph, stages: Mapping[str, int]) -> dict[int, int | None]:
    check_patterns(stages)
    unused = set(stages)
    stage_of: dict[int, int | None] = {}
    for node in graph.nodes:
        names = [node.name, *filter(None, modules_around(node))]
        fitting = [p for p in stages if any(p == name or matches(p, name) for name in names)]
        unused.difference_update(fitting)
        stage_of[node.index] = stages[fitting[0]] if fitting else None
    if unused:
        raise AnnotationError(
            f"stages has {', '.join(map(repr, sorted(unused)))}, which match no node or module; "
            f"nodes are {listed([repr(node.name) for node in graph.nodes], 8)}"
        )
    return stage_of
