"""What DTensor needs said and tensors here do not: replication of plain tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def implicit_replication() -> Iterator[None]:
    """Do nothing: tensors here are global, so those on no mesh take part in every operation.

    Example:
        >>> import torch, isoshard.torch_bridge as xs
        >>> x = xs.mark_sharding(torch.ones(8, device="jax"), xs.get_1d_mesh("x"), ("x",))
        >>> with implicit_replication():
        ...     (x + torch.ones(8, device="jax")).sum().item()
        16.0
    """
    yield
