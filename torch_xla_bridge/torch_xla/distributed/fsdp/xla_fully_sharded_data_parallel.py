"""FSDP by many processes: the name exists for `isinstance`; creating one raises."""

from __future__ import annotations

from typing import Any

import torch


class XlaFullyShardedDataParallel(torch.nn.Module):
    """FSDP in which each process holds a shard of its own. Refused: one process holds a mesh here.

    Raises:
        RuntimeError: always.
    """

    def __init__(self, module: torch.nn.Module, *args: Any, **kwargs: Any):
        """See the class."""
        raise RuntimeError(
            "XlaFullyShardedDataParallel runs one process per device, and isoshard one process for "
            "all of them. Use SpmdFullyShardedDataParallel(module, mesh=mesh) from "
            "torch_xla.experimental.spmd_fully_sharded_data_parallel, with a mesh that has an axis "
            "'fsdp'; auto_wrap_policy and auto_wrapper_callable are the same."
        )
