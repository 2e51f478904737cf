"""The mesh of each pipeline stage: given by the user, kept in the file, or made to fit.

A stage is on the devices that the specs of its nodes name. If they name none: on its part of the
axis along which the file says that stages lie, or on the next of as many equal runs of devices as
there are stages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import onnx
from jax.sharding import Mesh

from isoshard.core.kit import Tiles, as_mesh, describe_mesh, make_mesh

from ..errors import AnnotationError
from ..layouts.meshes import (
    NumberedMesh,
    fits,
    fitting_mesh,
    numbered_devices,
    renumbered,
    submesh,
)
from ..layouts.shardings import named_devices
from .annotations import Configuration
from .mesh_record import MeshRecord, read_mesh


def stage_meshes(
    model: onnx.ModelProto,
    configuration: Configuration,
    tiles: Mapping[int, Sequence[Tiles]],
    mesh: Mesh | None,
    notes: list[str],
) -> dict[int, NumberedMesh]:
    """Find the mesh of each stage.

    Raises:
        AnnotationError: the mesh has another number of devices, a stage is no part of it, or no
            mesh serves all specs of a stage.
        DeviceError: no mesh is given, and there are too few devices.
    """
    count = configuration.num_devices
    record = read_mesh(model, configuration.name)
    if record is not None and record.size != count:
        notes.append(
            f"the mesh kept in the file has {record.size} devices, the configuration {count}: "
            "meshes are made to fit"
        )
        record = None
    device_ids = {
        stage: named_devices(stage_tiles) or _without_tiles(at, len(tiles), count, record)
        for at, (stage, stage_tiles) in enumerate(tiles.items())
    }
    if mesh is not None:
        mesh = as_mesh(mesh)
        if mesh.size != count:
            raise AnnotationError(
                f"configuration {configuration.name!r} has {count} devices, the mesh "
                f"{describe_mesh(mesh)} has {mesh.size}; give a mesh of {count}"
            )
        return {stage: submesh(mesh, ids) for stage, ids in device_ids.items()}
    if record is not None:
        submeshes = _submeshes(make_mesh(record.shape, record.names), device_ids, tiles)
        if submeshes is not None:
            return submeshes
        notes.append("specs do not follow the mesh kept in the file: meshes are made to fit")
    return {
        stage: fitting_mesh(_full_tiles(tiles[stage], ids), ids, numbered_devices(ids))
        for stage, ids in device_ids.items()
    }


def _without_tiles(at: int, stages: int, count: int, record: MeshRecord | None) -> list[int]:
    """The devices of a stage that names none."""
    if stages == 1:
        return list(range(count))
    if record is not None and record.stage_axis is not None:
        axis = record.names.index(record.stage_axis)
        if record.shape[axis] == stages:
            inner = count // math.prod(record.shape[: axis + 1])
            return [n for n in range(count) if n // inner % stages == at]
    if count % stages:
        raise AnnotationError(
            f"a stage names no devices, and the {count} devices are no multiple of the {stages} "
            "stages; annotate a tensor in each stage"
        )
    run = count // stages
    return list(range(at * run, (at + 1) * run))


def _submeshes(
    mesh: Mesh, device_ids: Mapping[int, list[int]], tiles: Mapping[int, Sequence[Tiles]]
) -> dict[int, NumberedMesh] | None:
    """Parts of the mesh that was kept, or None if specs do not follow it."""
    submeshes = {}
    for stage, ids in device_ids.items():
        try:
            submeshes[stage] = submesh(mesh, ids)
        except AnnotationError:
            return None
        over = submeshes[stage]
        if not all(
            fits(renumbered(tile, over.device_ids), over.mesh)
            for tile in _full_tiles(tiles[stage], ids)
        ):
            return None
    return submeshes


def _full_tiles(tiles: Sequence[Tiles], device_ids: Sequence[int]) -> list[Tiles]:
    """The layouts that name every device of the stage; the others are errors of their own."""
    return [tile for tile in tiles if tile.grid.size == len(device_ids)]
