"""The types of torch tensors on a mesh with Explicit axes, as operands of a JAX function.

The type of a tensor is its declared sharding: by `iso.shard`, `iso.to_torch`, a mark
(`xs.mark_sharding`), or the JAX function that returned it. The sharding of results of torch
operations is the compiler's choice, so they have no type, and a function of such a tensor is traced
under Auto axes. Whether the tensor has been computed already makes no difference. Scalars, and
tensors on no mesh, are replicated.

>>> import torch, isoshard.torch_bridge as xs
>>> mesh = jax.make_mesh((8,), ("x",))
>>> t = torch.ones(8, 2, device="jax")
>>> types_of([t], "f", lambda: ["t"]) is None
True
>>> _ = xs.mark_sharding(t, mesh, P("x"))
>>> [sharding.spec for sharding in types_of([t], "f", lambda: ["t"]).shardings]
[P('x',)]
>>> types_of([t * 2, t], "f", lambda: ["t", "u"]).untyped
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
from isoshard.torch_bridge.engine.values import sharding_ids as layouts
from isoshard.torch_bridge.layout import marks

from .convert import DECLARED
from .users_mesh import describe_mesh, explicit_spec, of_type, under_auto_axes


@dataclasses.dataclass(frozen=True)
class Types:
    """The types of the operands of a call on a mesh with Explicit axes.

    Attributes:
        mesh: the user's.
        shardings: of each operand, along Explicit axes; none if some operand has no type.
        untyped: indices of the operands that have none.
    """

    mesh: AnyMesh
    shardings: tuple[NamedSharding, ...]
    untyped: tuple[int, ...] = ()

    def entered(self) -> contextlib.AbstractContextManager[Any]:
        """Context in which JAX finds the user's mesh; under Auto axes if an operand has no type."""
        if self.untyped:
            return under_auto_axes(self.mesh)
        return jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh)


def types_of(
    tensors: Sequence[lazy_tensor.LazyTensor], name: str, names: Callable[[], Sequence[str]]
) -> Types | None:
    """The types of tensors that a JAX function is called with.

    Returns:
        The types; None if none of them is on a mesh with Explicit axes.

    Raises:
        ShardingError: they are on different meshes.
    """
    layouts = [declared_sharding(tensor) for tensor in tensors]
    mesh = next(
        (layout.mesh for layout in layouts if layout is not None and is_typed(layout.mesh)), None
    )
    if mesh is None:
        if not is_typed(jax.sharding.get_abstract_mesh()) or any(layouts):
            return None
        mesh = ambient_mesh()
    if not all(layout is None or _is_compatible(layout.mesh, mesh) for layout in layouts):
        pairs = zip(names(), layouts, strict=True)
        where = "; ".join(
            f"{name} on {describe_mesh(layout.mesh)}" for name, layout in pairs if layout
        )
        raise ShardingError(
            f"{name}: the tensors are on different meshes: {where}. Reshard them to one: "
            "iso.reshard(tensor, mesh, spec)"
        )
    shardings, untyped = [], []
    for index, (tensor, layout) in enumerate(zip(tensors, layouts, strict=True)):
        if layout is not None:
            shardings.append(NamedSharding(mesh, explicit_spec(layout.spec, mesh)))
        elif tensor.dim() == 0 or _is_on_no_mesh(tensor):
            shardings.append(NamedSharding(mesh, P()))
        else:
            untyped.append(index)
    return Types(mesh, () if untyped else tuple(shardings), tuple(untyped))


def _is_compatible(other: AnyMesh, mesh: AnyMesh) -> bool:
    return same_grid(other, mesh) and (not is_typed(other) or other.axis_types == mesh.axis_types)


def declared_sharding(tensor: lazy_tensor.LazyTensor) -> NamedSharding | None:
    """The sharding that was declared for a tensor, in blocks of equal sizes; else None."""
    if tensor._chain.ops:
        return None
    storage = tensor._storage
    value = storage.value
    sharding: Any = storage.annotation or DECLARED.get(value)
    if sharding is None and value.slot < 0 and value.layout != layouts.UNPLACED:  # never recorded
        sharding = layouts.as_named(value.layout)
    if not isinstance(sharding, NamedSharding) or layouts.blocks(value.layout) is not None:
        return None
    return sharding


def declare_sharding(tensor: lazy_tensor.LazyTensor, sharding: NamedSharding) -> None:
    """Declare the sharding of a new tensor, which it has, or gets when it is computed.

    A type has no entries for other than Explicit axes, so it is no complete sharding there.
    """
    if not sharding.mesh.are_all_axes_explicit:
        return
    value = lazy_tensor.read(tensor)
    if value.array is None and isinstance(sharding.mesh, Mesh):
        marks.mark_result(tensor, sharding)
    else:
        DECLARED[value] = sharding


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
        types: as `types_of` returned them.
    """
    operands = []
    for x, aval in zip(arrays, avals, strict=True):
        sharding = aval.sharding
        if is_typed(sharding.mesh):
            x = of_type(x, sharding if types is None else on_mesh(sharding, types.mesh))
        operands.append(x)
    with under_auto_axes() if types is None else types.entered():
        results = function(*operands)
    return [under_auto(x) if isinstance(x, jax.Array) else x for x in results]


def explained_error(
    error: Exception, types: Types | None, names: Sequence[str], name: str
) -> Exception:
    """The exception to raise for a function that could not be traced."""
    where = f"{name}, called at {metrics.user_location()}"
    if types is not None and types.untyped:
        error.add_note(
            f"{where}, was traced under Auto axes: no sharding is declared for "
            f"{', '.join([names[index] for index in types.untyped])}, and the compiler chooses "
            "that of results of torch operations. For a function that uses Explicit axes, mark "
            "them first: xs.mark_sharding(t, mesh, spec)."
        )
    elif type(error).__name__ == "ShardingTypeError" and types is not None:
        pairs = zip(names, types.shardings, strict=True)
        shardings = ", ".join(f"{name} as {sharding.spec}" for name, sharding in pairs)
        return ShardingError(
            f"{where}: {error}\nThe operands are on the mesh {describe_mesh(types.mesh)}: "
            f"{shardings}. Give the result a sharding in the JAX function (out_sharding=..), or "
            "reshard an operand first (jax.sharding.reshard there, iso.reshard here)."
        )
    return error
