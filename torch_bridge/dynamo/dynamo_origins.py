"""What is known of how a tensor lies that dynamo traces, and the end of a graph where it is not.

An input lies as it lies. Its layout is read, and guarded, once somebody asks for it. A result of
what lays out has a layout of its own. Of anything else only the mesh is known, by the inputs that
it is made of; and that it is whole if all of these are, since each device can compute it.

A layout is noted with the fake tensor: `_layout`; `_mesh`, the mesh of one that is laid
out in a way that is not told; and `_input` for what an input was (its source for dynamo, and the
tensor).
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
    "how a tensor lies that a graph computes is the choice of XLA's partitioner, when the program "
    "is compiled. Lay it out first: t.redistribute(mesh, placements)."
)


def end_graph(name: str, why: str) -> NoReturn:
    """End the graph; with `fullgraph=True` that is the error.

    Args:
        name: of what ends it.
        why: a sentence, with what to write instead.

    Raises:
        torch._dynamo.exc.Unsupported: always; dynamo takes it.
    """
    hooks.END_GRAPH.found()(
        gb_type=f"isoshard: {name} ends the graph",
        context=name,
        explanation=f"{name} cannot be in a graph here: {why}",
        hints=["Or call it outside of the compiled function, or leave fullgraph=True out."],
    )
    raise AssertionError("dynamo's function returned")  # it never does


def guard(source: Opaque, kind: str) -> None:
    """Trace again where a value is another.

    Args:
        source: where it comes from, for dynamo.
        kind: of `GuardBuilder`.
    """
    hooks.GUARD.found()(source.make_guard(getattr(hooks.GUARDS.found(), kind)))


def is_ours(value: Opaque) -> bool:
    """Whether one of dynamo's values is a tensor on the device."""
    device = getattr(value, "device", None)
    return isinstance(device, torch.device) and device.type in naming.OURS


def are_pieces(tensor: Opaque) -> bool:
    """Whether one of dynamo's tensors is each device's own piece."""
    return isinstance(tensor.as_proxy().node.meta.get("example_value"), ManualTensor)


def is_of_pieces(tensor: Opaque) -> bool:
    """Whether one of dynamo's tensors is pieces, or a whole that a style made of pieces, or a view.

    Args:
        tensor: dynamo's.
    """
    example = tensor.as_proxy().node.meta.get("example_value")
    for one in (example, viewed(example)):
        if (origin := getattr(one, "_input", None)) is not None:
            guard(hooks.ATTRIBUTE.found()(origin[0], "_is_local"), "EQUALS_MATCH")
            return module_border.is_local_tensor(origin[1]())
        if module_border.is_local_tensor(one):
            return True
    return False


def layout(tensor: Opaque) -> MeshPlacements | None:
    """How one of dynamo's tensors lies, which is guarded if it is an input; None if unknown."""
    return _laid(tensor.as_proxy().node)


def _laid(node: Any) -> Any:
    example = node.meta.get("example_value")
    laid, origin = getattr(example, "_layout", None), getattr(example, "_input", None)
    if laid is not None or origin is None:
        return laid
    source, tensor = origin
    guard(hooks.ATTRIBUTE.found()(source, "_layout_key"), "EQUALS_MATCH")
    example._layout = tensor_placements.mesh_placements_of(tensor())
    return example._layout


def _origins(tensor: Any) -> Iterator[MeshPlacements | DeviceMesh]:
    """How the inputs lie that one of dynamo's tensors is made of, and what is laid out on the way.

    Of an input that is not computed yet it is the mesh of its program, if there is one.
    """
    waiting, seen = [tensor.as_proxy().node], set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        example = node.meta.get("example_value")
        origin = getattr(example, "_input", None)
        found = _laid(node) or getattr(example, "_mesh", None)
        found = found or (origin and tensor_placements.mesh_of_program(origin[1]()))
        if found is not None:
            yield found
        elif origin is None:
            waiting += node.all_input_nodes


def meshes(tensor: Opaque) -> set[DeviceMesh]:
    """The mesh of one of dynamo's tensors that is laid out; else those of what it is made of.

    What is computed lies on the whole of a mesh, also where what it is made of names a part.
    """
    laid = layout(tensor)
    if laid is not None:
        return {laid.mesh}
    return {one.mesh.root if isinstance(one, MeshPlacements) else one for one in _origins(tensor)}


def layout_of_whole(tensor: Opaque) -> MeshPlacements | None:
    """The layout of what is made of wholes, of which each device can compute all."""
    found = meshes(tensor)
    if len(found) != 1 or not all(map(_is_whole, _origins(tensor))):
        return None
    return tensor_placements.layout((0,) * tensor.ndim, found.pop(), None)


def _is_whole(origin: Any) -> bool:
    if not isinstance(origin, MeshPlacements) or origin.is_open:
        return False
    return all(placement.is_replicate() for placement in origin.placements)


def mesh_of(tensor: Opaque, name: str) -> DeviceMesh:
    """The only mesh of what one of dynamo's tensors is made of; ends the graph if it is not one.

    Args:
        tensor: dynamo's.
        name: of what asks.
    """
    found = meshes(tensor)
    if len(found) != 1:
        end_graph(name, f"it needs a mesh, and what is computed lies on {len(found)}: pass it.")
    return found.pop()


def note_input(value: Opaque, tensor: XLAShardedTensor) -> Any:
    """Dynamo's value of an input on the device, which remembers the tensor.

    Args:
        value: dynamo's.
        tensor: the input.
    """
    example = value.as_proxy().node.meta["example_value"]
    example._input = value.source, weakref.ref(tensor)
    return value
