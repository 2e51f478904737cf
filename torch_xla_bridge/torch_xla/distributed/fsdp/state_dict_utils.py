"""Checkpoints of FSDP by many processes, which torch_xla itself puts together."""

from __future__ import annotations

from typing import Any, NoReturn

_ADVICE = (
    "puts together what XlaFullyShardedDataParallel saved in many processes; isoshard has no such "
    "files. Put them together with torch_xla (python -m torch_xla.distributed.fsdp."
    "consolidate_sharded_ckpts) and load the one state_dict; state dicts made here are not split."
)


def consolidate_sharded_state_dicts(*args: Any, **kwargs: Any) -> NoReturn:
    """Refused; see the module.

    Args:
        *args: ignored.
        **kwargs: ignored.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(f"consolidate_sharded_state_dicts {_ADVICE}")


def consolidate_sharded_model_checkpoints(*args: Any, **kwargs: Any) -> NoReturn:
    """Refused; see the module.

    Args:
        *args: ignored.
        **kwargs: ignored.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(f"consolidate_sharded_model_checkpoints {_ADVICE}")
