"""The mesh of each pipeline stage: given by the user, kept in the file, or made to fit.

A stage lies on the devices that the specs of its nodes name. If they name none: on its part of the
axis along which the file says that stages lie, or on the next of as many equal runs of devices as
there are stages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import onnx
from jax.sharding import Mesh

from isoshard.core.layout.mesh import as_mesh, describe_mesh, make_mesh
from isoshard.core.layout.tiles import Tiles

from ..errors import AnnotationError
from ..layouts.meshes import (
    NumberedMesh,
    fits,
    fitting_mesh,
    numbered_devices,
    part_of_mesh,
    renumbered,
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
    numbers = {
        stage: named_devices(own) or _silent(at, len(tiles), count, record)
        for at, (stage, own) in enumerate(tiles.items())
    }
    if mesh is not None:
        mesh = as_mesh(mesh)
        if mesh.size != count:
            raise AnnotationError(
                f"configuration {configuration.name!r} has {count} devices, the mesh "
                f"{describe_mesh(mesh)} has {mesh.size}; give a mesh of {count}"
            )
        return {stage: part_of_mesh(mesh, held) for stage, held in numbers.items()}
    if record is not None:
        found = _kept(make_mesh(record.shape, record.names), numbers, tiles)
        if found is not None:
            return found
        notes.append("specs do not follow the mesh kept in the file: meshes are made to fit")
    return {
        stage: fitting_mesh(_whole(tiles[stage], held), held, numbered_devices(held))
        for stage, held in numbers.items()
    }


def _silent(at: int, stages: int, count: int, record: MeshRecord | None) -> list[int]:
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


def _kept(
    mesh: Mesh, numbers: Mapping[int, list[int]], tiles: Mapping[int, Sequence[Tiles]]
) -> dict[int, NumberedMesh] | None:
    """Parts of the mesh that was kept, or None if specs do not follow it."""
    found = {}
    for stage, held in numbers.items():
        try:
            found[stage] = part_of_mesh(mesh, held)
        except AnnotationError:
            return None
        over = found[stage]
        if not all(
            fits(renumbered(one, over.numbers), over.mesh) for one in _whole(tiles[stage], held)
        ):
            return None
    return found


def _whole(tiles: Sequence[Tiles], numbers: Sequence[int]) -> list[Tiles]:
    """The layouts that name every device of the stage; the others are faults of their own."""
    return [one for one in tiles if one.grid.size == len(numbers)]
