"""Axes that do not divide: torch_xla pads them, JAX has no buffers for them.

`mark_sharding` takes such a spec, with a warning, so that scripts written for torch_xla run:

>>> import warnings
>>> import torch, isoshard.torch_bridge as xs
>>> mesh = xs.Mesh(range(8), (8,), ("x",))
>>> with warnings.catch_warnings(record=True, action="always") as caught:
...     t = xs.mark_sharding(torch.arange(9.0).to("jax"), mesh, ("x",))
>>> caught[0].category.__name__
'UnevenWarning'
>>> t.sharding_spec, t.named_sharding.spec
('{devices=[8]0,1,2,3,4,5,6,7}', P())
>>> t.local_shards[4].data, t.local_shards[4].unpadded_data
(tensor([8., 0.]), tensor([8.]))

Values, `sharding_spec` and `local_shards` are torch_xla's. The buffers of such a tensor are whole
along that axis on every device. A value marked inside a step is divided there by XLA, which pads;
it is whole again where the program ends. `isoshard.shard` refuses instead. With `sizes=` the
buffers are of unequal pieces, see `layout.uneven_shards`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from isoshard.core.errors import CodedWarning, UnevenError
from isoshard.core.layout.mesh import mesh_of
from isoshard.core.layout.spec import check_even, named_sharding
from isoshard.core.runtime import metrics
from isoshard.core.runtime.user_warnings import warn_user
from isoshard.torch_bridge.common.argument_types import DeviceTensor
from isoshard.torch_bridge.layout import graph_calls, marks
from isoshard.torch_bridge.layout.marks import Sharding


class UnevenWarning(CodedWarning, code="ISO055"):
    """A tensor is marked with a split that does not divide it, so its buffers are not split."""


def even_part(sharding: Sharding, shape: Sequence[int]) -> tuple[Sharding, Sharding | None]:
    """The nearest layout that JAX has buffers for.

    Args:
        sharding: what was asked for.
        shape: of the tensor.

    Returns:
        The layout without the axes that do not divide, and what was asked for if that is another;
        None otherwise. Warns once per line of user code if so, and counts it.
    """
    even, fault = even_layout(sharding, shape)
    if not fault:
        return even, None
    metrics.count("uneven_marks")
    warn_user(
        f"{fault.removeprefix('tensor: ')} Its buffers stay whole along what does not divide, so "
        "they take more memory than the spec says; xs.mark_sharding(t, mesh, spec, sizes='chunk') "
        "splits them unequally.",
        UnevenWarning,
    )
    return even, sharding


def laid_out(t: DeviceTensor, sharding: Sharding) -> Any:
    """A new tensor with the same elements in a layout, or in the even part of it; below autograd.

    Args:
        t: on the `jax` device, or traced in its place.
        sharding: what was asked for.
    """
    return graph_calls.laid_by(_laid_out, graph_calls.same_shape, t, sharding)


def _laid_out(t: DeviceTensor, sharding: Sharding) -> Any:
    return marks.laid_out(t, *even_part(sharding, t.shape))


def even_layout(
    sharding: Sharding, shape: Sequence[int], name: str = "tensor"
) -> tuple[Sharding, str]:
    """The layout without the axes that do not divide, and what is wrong with them ("": none).

    Args:
        sharding: what was asked for.
        shape: of the tensor.
        name: of the tensor, for messages.
    """
    mesh = mesh_of(sharding)
    try:
        check_even(sharding.spec, mesh, shape, name=name)
    except UnevenError as error:
        fault = str(error)
    else:
        return sharding, ""
    entries = [
        entry if _divides(entry, mesh, extent) else None
        for entry, extent in zip(sharding.spec, shape, strict=False)
    ]
    return named_sharding(jax.sharding.PartitionSpec(*entries), mesh, len(shape)), fault


def _divides(entry: object, mesh: jax.sharding.Mesh, extent: int) -> bool:
    try:
        check_even(jax.sharding.PartitionSpec(entry), mesh, (extent,))
    except UnevenError:
        return False
    return True
