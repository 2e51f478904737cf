"""What DTensor needs said and tensors here do not: replication of plain tensors, sharding rules."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NoReturn

from isoshard.core.errors import ShardingError
from isoshard.torch_bridge.argument_types import Opaque


@contextlib.contextmanager
def implicit_replication() -> Iterator[None]:
    """Do nothing: tensors here are whole, so those on no mesh take part in every operation.

    Example:
        >>> import torch, isoshard.torch_bridge as xs
        >>> x = xs.mark_sharding(torch.ones(8, device="jax"), xs.get_1d_mesh("x"), ("x",))
        >>> with implicit_replication():
        ...     (x + torch.ones(8, device="jax")).sum().item()
        16.0
    """
    yield


def register_sharding(op: Opaque) -> NoReturn:
    """Refused: no operation needs a rule, XLA's partitioner works out how each is computed.

    Args:
        op: the operator.

    Raises:
        ShardingError: always.

    Example:
        >>> import torch
        >>> try:
        ...     register_sharding(torch.ops.aten.relu.default)
        ... except ShardingError as error:
        ...     print(str(error).partition(":")[0])
        register_sharding(aten.relu.default) is not needed here
    """
    raise ShardingError(
        f"register_sharding({op}) is not needed here: XLA partitions every operation, custom ones "
        "too once xs.register_lowering gives their JAX function. Delete the registration. Where "
        "the layout matters, ask for it with tensor.redistribute(mesh, placements), or write the "
        "function of one device's pieces with local_map."
    )
