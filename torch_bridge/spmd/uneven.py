"""Marks of axes that do not divide: torch_xla pads them, JAX has no buffers for them.

`mark_sharding` accepts such a spec with a warning, so that scripts written for torch_xla run:

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

Values, `sharding_spec` and `local_shards` are torch_xla's. The buffers of such a tensor are
replicated along that axis. A value marked inside a step is split there by XLA, which pads; it is
replicated again at the end of the program. `isoshard.shard` raises instead. With `sizes=` the
shards have unequal sizes, see `layout.uneven_shards`.
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


def even_with_warning(sharding: Sharding, shape: Sequence[int]) -> tuple[Sharding, Sharding | None]:
    """The requested sharding without the axes that do not divide, with a warning if there are some.

    Returns:
        The even sharding, and the requested one if that is another, else None. The warning is given
        once per line of user code, and counted.
    """
    even, message = even_layout(sharding, shape)
    if not message:
        return even, None
    metrics.count("uneven_marks")
    warn_user(
        f"{message.removeprefix('tensor: ')} Its buffers are replicated along such axes, so they "
        "take more memory than the spec implies; xs.mark_sharding(t, mesh, spec, sizes='chunk') "
        "splits them unequally.",
        UnevenWarning,
    )
    return even, sharding


def constrained_evenly(t: DeviceTensor, sharding: Sharding) -> Any:
    """A new tensor with a sharding, without the axes that do not divide; below autograd.

    Args:
        t: on the `jax` device, or traced.
        sharding: the requested one.
    """
    return graph_calls.record_or_trace(_constrained_evenly, graph_calls.same_shape, t, sharding)


def _constrained_evenly(t: DeviceTensor, sharding: Sharding) -> Any:
    return marks.constrained(t, *even_with_warning(sharding, t.shape))


def even_layout(
    sharding: Sharding, shape: Sequence[int], name: str = "tensor"
) -> tuple[Sharding, str]:
    """The sharding without the axes that do not divide, and the error message for these, or ""."""
    mesh = mesh_of(sharding)
    try:
        check_even(sharding.spec, mesh, shape, name=name)
    except UnevenError as error:
        message = str(error)
    else:
        return sharding, ""
    entries = [
        entry if _divides(entry, mesh, extent) else None
        for entry, extent in zip(sharding.spec, shape, strict=False)
    ]
    return named_sharding(jax.sharding.PartitionSpec(*entries), mesh, len(shape)), message


def _divides(entry: object, mesh: jax.sharding.Mesh, extent: int) -> bool:
    try:
        check_even(jax.sharding.PartitionSpec(entry), mesh, (extent,))
    except UnevenError:
        return False
    return True
