"""The bytes of parameters, inputs and results on every device, stage by stage.

Read from the annotations and what follows from them by the rules of `semantics`, without devices:
the sharding of a model for 512 chips can be inspected on a laptop.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping

import onnx

from ..reading.annotations import choose
from ..reading.graph import Graph
from .placement import Placement
from .semantics import Check
from .validating import checked


@dataclasses.dataclass(frozen=True)
class DeviceTensor:
    """A tensor in a stage.

    Attributes:
        name: of the tensor.
        kind: "parameter", "input" or "value".
        shape: a size, a symbol or None per axis; None if the rank is not known.
        dtype: name of the dtype, or "?".
        placement: where its blocks are; None if unknown.
        block_bytes: bytes of one block, rounded up where it does not split evenly; None if a size
            is not known.
        annotated: whether it has a spec, rather than being inferred or unsharded without one.
    """

    name: str
    kind: str
    shape: tuple[int | str | None, ...] | None
    dtype: str
    placement: Placement | None
    block_bytes: int | None
    annotated: bool

    def on(self, device: int) -> int | None:
        """Bytes of it on a device: 0 where it is not, None if unknown."""
        if self.placement is None:
            return None
        return self.block_bytes if device in self.placement.holds else 0


@dataclasses.dataclass(frozen=True)
class StageHoldings:
    """A stage and what is in it.

    Attributes:
        stage: of the stage.
        devices: those that its specs name; all if they name none.
        operators: of its nodes, in order.
        tensors: parameters, then inputs, then values.
    """

    stage: int
    devices: tuple[int, ...]
    operators: tuple[str, ...]
    tensors: tuple[DeviceTensor, ...]

    def total(self, device: int, kind: str) -> tuple[int, bool]:
        """Bytes of one kind of tensor on a device.

        Returns:
            The bytes, and whether that is all: some sizes or placements may be unknown.
        """
        sizes = [tensor.on(device) for tensor in self.tensors if tensor.kind == kind]
        return sum(size or 0 for size in sizes), None not in sizes


def holdings(
    model: onnx.ModelProto | str | os.PathLike[str] | bytes,
    config: str | None = None,
    sizes: Mapping[str, int] | None = None,
) -> list[StageHoldings]:
    """List what each device stores."""
    graph, broken = checked(model)
    configuration = choose(graph.model, config)
    name, count = configuration.name, configuration.num_devices
    check = Check(graph, name, count, {(node, tensor) for of, node, tensor in broken if of == name})
    check.run()
    return [_stage(check, stage, sizes or {}) for stage in sorted(set(check.stages)) or [0]]


def _stage(check: Check, stage: int, sizes: Mapping[str, int]) -> StageHoldings:
    graph = check.graph
    nodes = [node for node in graph.nodes if check.stages[node.index] == stage]
    devices = sorted(check.devices_of(stage))
    tensors_by_name: dict[str, DeviceTensor] = {}
    for node in nodes:
        for name in filter(None, (*node.inputs, *node.captured)):
            kind = "parameter" if name in graph.initializers else "input"
            if name not in tensors_by_name and (kind == "parameter" or name in graph.inputs):
                readers = [reader for reader in graph.consumers(name) if reader in nodes]
                placements = [check.declared.get(reader.index, {}).get(name) for reader in readers]
                declared = next(
                    (placement for placement in placements if placement is not None), None
                )
                tensors_by_name[name] = _device_tensor(
                    graph, name, kind, declared, declared is not None, devices, sizes
                )
    for node in nodes:
        for name in filter(None, node.outputs):
            declared = name in check.declared.get(node.index, {})
            placement = check.results.get(name)
            is_placed = placement is not None or name not in check.results
            entry = _device_tensor(
                graph, name, "value", placement, declared, devices if is_placed else [], sizes
            )
            tensors_by_name[name] = entry
    order = ("parameter", "input", "value")
    tensors = sorted(tensors_by_name.values(), key=lambda tensor: order.index(tensor.kind))
    operators = tuple(node.op_type for node in nodes)
    return StageHoldings(stage, tuple(devices), operators, tuple(tensors))


def _device_tensor(
    graph: Graph,
    name: str,
    kind: str,
    placement: Placement | None,
    annotated: bool,
    devices: list[int],
    sizes: Mapping[str, int],
) -> DeviceTensor:
    shape, dtype = graph.shape(name), graph.dtype(name)
    if placement is None and devices and shape is not None:
        placement = Placement.unsplit(len(shape), devices)
    dims = list(_sizes(shape or (), sizes))
    size = None
    if (
        shape is not None
        and dtype is not None
        and placement is not None
        and len(dims) == len(shape)
    ):
        blocks = [-(-dim // count) for dim, count in zip(dims, placement.counts, strict=True)]
        size = math.prod(blocks) * dtype.itemsize
    return DeviceTensor(name, kind, shape, dtype.name if dtype else "?", placement, size, annotated)


def _sizes(shape: tuple[int | str | None, ...], by_name: Mapping[str, int]) -> Iterator[int]:
    for size in shape:
        value = by_name.get(size) if isinstance(size, str) else size
        if value is not None:
            yield value
