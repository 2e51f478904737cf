"""`iso.shard(.., uneven="pad")`: arrays in blocks of unequal sizes.

>>> from isoshard.core.layout.mesh import make_mesh
>>> mesh = make_mesh((4,), ("x",))
>>> tree = {"rows": np.ones(6, np.float32), "step": 3}
>>> shard_padded(tree, mesh, ("x",), None, None, None)
{'rows': UnevenArray(float32[6] in float32[8], axis 0 in blocks of 2: 2, 2, 2, 0 valid; P('x',)), 'step': 3}
"""  # noqa: E501

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from isoshard.core.errors import ShardingError, no_sharing, raise_collected
from isoshard.core.layout.spec import named_sharding
from isoshard.core.transfer.host_memory import narrowed
from isoshard.core.transfer.leaf_specs import named_arrays, set_specs

from .chunk_sizes import plan_splits
from .packing import pack


def shard_padded(
    x: Any, mesh: Mesh, spec: Any, sizes: Any, copy: bool | None, name: str | None
) -> Any:
    """Shard with padding; all leaves are checked before any is placed."""
    if isinstance(x, np.ndarray):
        x = narrowed(x, copy, name or "array")
    if isinstance(x, np.ndarray | jax.Array):
        return pack(x, mesh, spec, sizes, copy=copy, name=name or "array")
    leaves, structure = named_arrays(x, name)
    structs = [leaf.name for leaf in leaves if isinstance(leaf.value, jax.ShapeDtypeStruct)]
    if structs:
        raise ShardingError(
            f"uneven='pad' is of arrays, and {', '.join(structs)} is a jax.ShapeDtypeStruct. Pad "
            "its shape, and leave uneven out."
        )
    theirs = [leaf.name for leaf in leaves if leaf.framework is not None]
    if theirs or sizes is not None:
        reason = f"{', '.join(theirs)} belong to a framework" if theirs else "x is a tree of arrays"
        raise ShardingError(
            f"uneven='pad' is of trees of NumPy and JAX arrays, and sizes= of one array: {reason}. "
            "Shard the arrays and tensors one by one."
        )
    set_specs(leaves, structure, mesh, spec, name)
    errors = []
    arrays = [leaf for leaf in leaves if not leaf.is_passthrough]
    for leaf in arrays:
        try:
            if isinstance(leaf.value, np.ndarray):
                leaf.value = narrowed(leaf.value, copy, leaf.name)
            sharding = named_sharding(leaf.spec, mesh, leaf.value.ndim, name=leaf.name)
            if copy is False and any(plan_splits(leaf.value.shape, sharding, None)):
                raise no_sharing(leaf.name, "blocks of other sizes are padded")
        except ShardingError as error:
            errors.append(error)
    raise_collected(errors)
    for leaf in arrays:
        leaf.value = pack(leaf.value, mesh, leaf.spec, copy=copy, name=leaf.name)
    return jax.tree.unflatten(structure, [leaf.value for leaf in leaves])
