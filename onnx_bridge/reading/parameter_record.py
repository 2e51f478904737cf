"""The names of weights in a model's metadata: which tensor is which weight of the exported module.

Exporters rename weights and transpose them. The metadata, which every tool carries along, keeps
under the key "isoshard.parameters" for each tensor that comes from a weight the weight's name and,
axis by axis, which axis of the weight it is.

>>> model = onnx.ModelProto()
>>> write_parameters(model, {"val_2": Origin("up.weight", (1, 0))})
>>> parameters_of(model)
{'val_2': Origin(parameter='up.weight', axes=(1, 0))}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

import onnx

from ..errors import ModelError

_KEY = "isoshard.parameters"
Axes = tuple[int | None, ...]


class Origin(NamedTuple):
    """What a constant is made of.

    Attributes:
        parameter: name of the weight before anything was folded.
        axes: for each axis of the constant the axis of the weight that it is; None: a new one.
    """

    parameter: str
    axes: Axes

    def spec(self, entries: tuple[object, ...]) -> tuple[object, ...]:
        """Carry the entries of the weight's spec over to the constant.

        Example:
            >>> Origin("w", (1, None, 0)).spec(("x",))
            (None, None, 'x')
        """
        return tuple(
            entries[axis] if axis is not None and axis < len(entries) else None
            for axis in self.axes
        )


def write_parameters(model: onnx.ModelProto, parameters: Mapping[str, Origin]) -> None:
    """Write the names of weights into a model's metadata."""
    entry = next((p for p in model.metadata_props if p.key == _KEY), None)
    entry = model.metadata_props.add() if entry is None else entry
    entry.key = _KEY
    entry.value = json.dumps(parameters)


def parameters_of(model: onnx.ModelProto) -> dict[str, Origin]:
    """Read which weight each tensor of an exported model comes from.

    Args:
        model: as `export_torch` made it, or any other.

    Returns:
        By name of the tensor; empty if the model does not say.

    Raises:
        ModelError: what it says is malformed.

    Example:
        >>> model = onnx.ModelProto()
        >>> parameters_of(model)
        {}
        >>> write_parameters(model, {"val_2": Origin("up.weight", (1, 0))})    # as an export does
        >>> parameters_of(model)["val_2"].parameter
        'up.weight'
    """
    entry = next((p for p in model.metadata_props if p.key == _KEY), None)
    if entry is None:
        return {}
    try:
        return {
            tensor: Origin(str(name), tuple(None if a is None else int(a) for a in axes))
            for tensor, (name, axes) in json.loads(entry.value).items()
        }
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"the metadata {_KEY!r} cannot be read: {error}") from None
