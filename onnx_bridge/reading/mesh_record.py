"""The axes of a mesh in a model's metadata, so that a round trip gives the same names back.

ONNX numbers devices and knows no mesh. The metadata, which every tool carries along, keeps the
axes under the key "isoshard.mesh.<configuration>":

>>> model = onnx.ModelProto()
>>> write_mesh(model, "tp", MeshRecord((("stage", 2), ("model", 4)), "stage"))
>>> model.metadata_props[0].value
'{"axes": [["stage", 2], ["model", 4]], "stage_axis": "stage"}'
>>> read_mesh(model, "tp").size
8
"""

from __future__ import annotations

import json
import math
from typing import NamedTuple

import onnx

from ..errors import ModelError

_KEY = "isoshard.mesh."


class MeshRecord(NamedTuple):
    """The axes of a mesh over all devices of a configuration.

    Attributes:
        axes: pairs of name and size, the last fastest.
        stage_axis: the one along which pipeline stages lie, or None.
    """

    axes: tuple[tuple[str, int], ...]
    stage_axis: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the axes."""
        return tuple(name for name, _ in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the axes."""
        return tuple(size for _, size in self.axes)

    @property
    def size(self) -> int:
        """The number of devices."""
        return math.prod(self.shape)


def write_mesh(model: onnx.ModelProto, config: str, record: MeshRecord) -> None:
    """Keep the axes of a mesh."""
    key = _KEY + config
    entry = next((prop for prop in model.metadata_props if prop.key == key), None)
    entry = model.metadata_props.add(key=key) if entry is None else entry
    entry.value = json.dumps(record._asdict())


def read_mesh(model: onnx.ModelProto, config: str) -> MeshRecord | None:
    """Read the axes of a mesh.

    Example:
        >>> read_mesh(onnx.ModelProto(), "tp") is None
        True
    """
    key = _KEY + config
    entry = next((prop for prop in model.metadata_props if prop.key == key), None)
    if entry is None:
        return None
    try:
        loaded = json.loads(entry.value)
        axes = tuple((str(name), int(size)) for name, size in loaded["axes"])
        record = MeshRecord(axes, loaded.get("stage_axis"))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelError(f"the metadata {key!r} cannot be read: {error!r}; remove it") from None
    names = record.names
    if len(set(names)) < len(names) or record.stage_axis not in (None, *names) or not names:
        raise ModelError(f"the metadata {key!r} describes no mesh: {entry.value:.200}; remove it")
    if min(record.shape) < 1:
        raise ModelError(f"the metadata {key!r} has an axis of size {min(record.shape)}; remove it")
    return record
