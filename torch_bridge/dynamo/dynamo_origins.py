"""Placements of tensors that dynamo traces, and graph breaks where they are unknown.

The placements of an input are those of the tensor, guarded once they are read. A result of
`redistribute` and its like has placements of its own. Of any other value only the mesh is known,
from the inputs that it is computed from; and that it is replicated if all of these are.

They are attributes of the fake tensor: `_placed`; `_mesh`, the mesh of one that is sharded
in an unknown way; and `_input` of an input (its source for dynamo, and the tensor).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, NoReturn

import torch

from isoshard.torch_bridge._torch_internals import dynamo_values as hooks
from isoshard.torch_bridge._torch_internals.tensor_fields import viewed
from isoshard.torch_bridge.common.argument_types import Opaque
from isoshard.torch_bridge.distributed import tensor_placements
from isoshard.torch_bridge.distributed.device_mesh import DeviceMesh
from isoshard.torch_bridge.distributed.tensor.parallel import module_border
from isoshard.torch_bridge.distributed.tensor_placements import MeshPlacements
from isoshard.torch_bridge.spmd.manual_tensor import ManualTensor
from isoshard.torch_bridge.tensors.tensor import XLAShardedTensor

from ..common import naming

UNKNOWN = (
    "the sharding of a tensor that a graph computes is the choice of XLA's partitioner, when the "
    "program is compiled. Give it placements first: t.redistribute(mesh, placements)."
)


def end_graph(name: str, why: str) -> NoReturn:
    """End the graph; with `fullgraph=True` that is the error. `why` names what to write instead.

    Raises:
        torch._dynamo.exc.Unsupported: always; dynamo catches it.
    """
    hooks.END_GRAPH.resolve()(
        gb_type=f"isoshard: {name} ends the graph",
        context=name,
        explanation=f"{name} cannot be in a graph here: {why}",
        hints=["Or call it outside of the compiled function, or leave fullgraph=True out."],
    )
    raise AssertionError("dynamo's function returned")  # it never does


def guard(source: Opaque, kind: str) -> None:
    """Guard a value: another one is traced again.

    Args:
        source: dynamo's, of the value.
        kind: of `GuardBuilder`.
    """
    hooks.GUARD.resolve()(source.make_guard(getattr(hooks.GUARDS.resolve(), kind)))


def is_ours(value: Opaque) -> bool:
    """Whether one of dynamo's values is a tensor on the device."""
    device = getattr(value, "device", None)
    return isinstance(device, torch.device) and device.type in naming.OURS


def is_manual(tensor: Opaque) -> bool:
    """Whether one of dynamo's tensors is a `ManualTensor`: each device's local tensor."""
    return isinstance(tensor.as_proxy().node.meta.get("example_value"), ManualTensor)


def is_local_tensor(tensor: Opaque) -> bool:
    """Whether one of dynamo's tensors, or the base of a view, is local: see `module_border`."""
    example = tensor.as_proxy().node.meta.get("example_value")
    for fake in (example, viewed(example)):
        if (origin := getattr(fake, "_input", None)) is not None:
            guard(hooks.ATTRIBUTE.resolve()(origin[0], "_is_local"), "EQUALS_MATCH")
            return module_border.is_local_tensor(origin[1]())
        if module_border.is_local_tensor(fake):
            return True
    return False


def layout(tensor: Opaque) -> MeshPlacements | None:
    """The placements of one of dynamo's tensors, guarded if it is an input; None if unknown."""
    return _layout_of_node(tensor.as_proxy().node)


def _layout_of_node(node: Any) -> Any:
    example = node.meta.get("example_value")
    placements = getattr(example, "_placed", None)
    origin = getattr(example, "_input", None)
    if placements is not None or origin is None:
        return placements
    source, tensor = origin
    guard(hooks.ATTRIBUTE.resolve()(source, "_layout_key"), "EQUALS_MATCH")
    example._placed = tensor_placements.mesh_placements_of(tensor())
    return example._placed


def _origins(tensor: Any) -> Iterator[MeshPlacements | DeviceMesh]:
    """Placements of the inputs and intermediate values that one of dynamo's tensors comes from.

    For an input that is not computed yet, the mesh of its program, if there is one.
    """
    pending, seen = [tensor.as_proxy().node], set()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        example = node.meta.get("example_value")
        origin = getattr(example, "_input", None)
        placement = _layout_of_node(node) or getattr(example, "_mesh", None)
        placement = placement or (origin and tensor_placements.mesh_of_program(origin[1]()))
        if placement is not None:
            yield placement
        elif origin is None:
            pending += node.all_input_nodes


def meshes(tensor: Opaque) -> set[DeviceMesh]:
    """The mesh of one of dynamo's tensors with placements; else those of its origins.

    A computed value is on the root mesh, also if an origin is on a submesh.
    """
    placements = layout(tensor)
    if placements is not None:
        return {placements.mesh}
    origins = _origins(tensor)
    return {x.mesh.root if isinstance(x, MeshPlacements) else x for x in origins}


def replicated_layout(tensor: Opaque) -> MeshPlacements | None:
    """Replicated placements of a value computed from replicated ones; None if some are not."""
    candidates = meshes(tensor)
    if len(candidates) != 1 or not all(map(_is_replicated, _origins(tensor))):
        return None
    return tensor_placements.layout((0,) * tensor.ndim, candidates.pop(), None)


def _is_replicated(origin: Any) -> bool:
    if not isinstance(origin, MeshPlacements) or origin.is_open:
        return False
    return all(placement.is_replicate() for placement in origin.placements)


def mesh_of(tensor: Opaque, name: str) -> DeviceMesh:
    """The only mesh of one of dynamo's tensors; ends the graph if there is not exactly one."""
    candidates = meshes(tensor)
    if len(candidates) != 1:
        end_graph(name, f"it needs a mesh, and the value is on {len(candidates)}: pass it.")
    return candidates.pop()


def note_input(value: Opaque, tensor: XLAShardedTensor) -> Any:
    """Record the tensor of an input on the device with dynamo's value of it."""
    example = value.as_proxy().node.meta["example_value"]
    example._input = value.source, weakref.ref(tensor)
    return value
