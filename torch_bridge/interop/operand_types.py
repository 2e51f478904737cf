"""The types of torch tensors on a mesh with Explicit axes, for a JAX function that is given them.

A tensor has the layout that somebody gave it as its type: `iso.shard`, `iso.to_torch`, a mark
(`xs.mark_sharding`), or the JAX function that made it. What torch operations make is laid out by
the compiler, and has no type: a function that is given such a tensor is traced under Auto axes.
Whether the tensor has been computed already makes no difference. Scalars, and tensors on no mesh,
are whole on each device.

>>> import torch, isoshard.torch_bridge as xs
>>> mesh = jax.make_mesh((8,), ("x",))
>>> t = torch.ones(8, 2, device="jax")
>>> types_of([t], "f", lambda: ["t"]) is None
True
>>> _ = xs.mark_sharding(t, mesh, P("x"))
>>> [sharding.spec for sharding in types_of([t], "f", lambda: ["t"]).shardings]
[P('x',)]
>>> types_of([t * 2, t], "f", lambda: ["t", "u"]).untold
(0,)
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.errors import ShardingError
from isoshard.core.layout.axis_types import AnyMesh, is_typed, on_mesh, same_grid, under_auto
from isoshard.core.layout.mesh import ambient_mesh
from isoshard.core.runtime import metrics
from isoshard.core.runtime._jax_internals.tracers import Tracer
from isoshard.torch_bridge.common.argument_types import LayoutLike
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.values import layout_numbers as layouts
from isoshard.torch_bridge.layout import marks

from .convert import SAID
from .users_mesh import described, explicit_part, of_type, under_auto_axes


@dataclasses.dataclass(frozen=True)
class Types:
    """What is known of the operands of a call on a mesh with Explicit axes.

    Attributes:
        mesh: the user's.
        shardings: of each operand, along Explicit axes; none if some operand has no type.
        untold: numbers of the operands that have none.
    """

    mesh: AnyMesh
    shardings: tuple[NamedSharding, ...]
    untold: tuple[int, ...] = ()

    def entered(self) -> contextlib.AbstractContextManager[Any]:
        """Context in which JAX finds the user's mesh; under Auto axes if an operand has no type."""
        if self.untold:
            return under_auto_axes(self.mesh)
        return jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh)


def types_of(
    tensors: Sequence[lazy_tensor.LazyTensor], what: str, names: Callable[[], Sequence[str]]
) -> Types | None:
    """The types of tensors that a JAX function is called with.

    Args:
        tensors: the operands.
        what: is called, for messages.
        names: gives the names of the operands, for messages.

    Returns:
        The types; None if none of them is on a mesh with Explicit axes.

    Raises:
        ShardingError: they are on different meshes.
    """
    layouts = [said(tensor) for tensor in tensors]
    mesh = next((one.mesh for one in layouts if one is not None and is_typed(one.mesh)), None)
    if mesh is None:
        if not is_typed(jax.sharding.get_abstract_mesh()) or any(layouts):
            return None
        mesh = ambient_mesh()
    if not all(one is None or _goes_with(one.mesh, mesh) for one in layouts):
        pairs = zip(names(), layouts, strict=True)
        lie = "; ".join(f"{name} on {described(one.mesh)}" for name, one in pairs if one)
        raise ShardingError(
            f"{what}: the tensors lie on different meshes: {lie}. Lay them out on one: "
            "iso.reshard(tensor, mesh, spec)"
        )
    shardings, untold = [], []
    for number, (tensor, one) in enumerate(zip(tensors, layouts, strict=True)):
        if one is not None:
            shardings.append(NamedSharding(mesh, explicit_part(one.spec, mesh)))
        elif tensor.dim() == 0 or _is_on_no_mesh(tensor):
            shardings.append(NamedSharding(mesh, P()))
        else:
            untold.append(number)
    return Types(mesh, () if untold else tuple(shardings), tuple(untold))


def _goes_with(one: AnyMesh, mesh: AnyMesh) -> bool:
    return same_grid(one, mesh) and (not is_typed(one) or one.axis_types == mesh.axis_types)


def said(tensor: lazy_tensor.LazyTensor) -> NamedSharding | None:
    """The layout that somebody gave a tensor, in equal blocks."""
    if tensor._chain.ops:
        return None
    storage = tensor._storage
    value = storage.value
    found: Any = storage.annotation or SAID.get(value)
    if found is None and value.slot < 0 and value.layout != layouts.UNPLACED:  # never recorded
        found = layouts.as_named(value.layout)
    if not isinstance(found, NamedSharding) or layouts.blocks(value.layout) is not None:
        return None
    return found


def say(tensor: lazy_tensor.LazyTensor, sharding: NamedSharding) -> None:
    """Give a new tensor a layout, which it has or gets where it is computed.

    Along other than Explicit axes a type leaves it to the compiler, so it is no whole layout there.
    """
    if not sharding.mesh.are_all_axes_explicit:
        return
    value = lazy_tensor.read(tensor)
    if value.array is None and isinstance(sharding.mesh, Mesh):
        marks.mark_result(tensor, sharding)
    else:
        SAID[value] = sharding


def _is_on_no_mesh(tensor: lazy_tensor.LazyTensor) -> bool:
    array = tensor._storage.value.array
    if isinstance(array, Tracer) or tensor._chain.ops:
        return False
    return isinstance(array, np.ndarray) or (
        isinstance(array, jax.Array) and len(array.sharding.device_set) == 1
    )


def typed_call(
    function: Callable[..., Sequence[Any]],
    arrays: Sequence[Any],
    avals: Sequence[Any],
    types: LayoutLike,
) -> list[Any]:
    """Call a function that was traced with types, from under Auto axes and back there.

    Args:
        function: takes arrays.
        arrays: under Auto axes, or on no mesh.
        avals: that it was traced with.
        types: what `types_of` found.
    """
    given = []
    for x, aval in zip(arrays, avals, strict=True):
        sharding = aval.sharding
        if is_typed(sharding.mesh):
            x = of_type(x, sharding if types is None else on_mesh(sharding, types.mesh))
        given.append(x)
    with under_auto_axes() if types is None else types.entered():
        found = function(*given)
    return [under_auto(x) if isinstance(x, jax.Array) else x for x in found]


def explained(error: Exception, types: Types | None, names: Sequence[str], what: str) -> Exception:
    """What to raise where a function could not be traced.

    Args:
        error: what JAX raised.
        types: of the operands.
        names: of the operands.
        what: was called.
    """
    where = f"{what}, called at {metrics.user_location()}"
    if types is not None and types.untold:
        error.add_note(
            f"{where}, was traced under Auto axes: nobody has said how "
            f"{', '.join([names[number] for number in types.untold])} lie; torch operations made "
            "them, and the compiler lays them out. For a function that speaks of Explicit axes, "
            "mark them first: xs.mark_sharding(t, mesh, spec)."
        )
    elif type(error).__name__ == "ShardingTypeError" and types is not None:
        pairs = zip(names, types.shardings, strict=True)
        lie = ", ".join(f"{name} as {sharding.spec}" for name, sharding in pairs)
        return ShardingError(
            f"{where}: {error}\nThe operands lie over the mesh {described(types.mesh)}: {lie}. Say "
            "in the JAX function how the result shall lie (out_sharding=..), or lay an operand out "
            "first (jax.sharding.reshard there, iso.reshard here)."
        )
    return error
