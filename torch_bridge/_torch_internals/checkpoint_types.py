"""Types of `torch.distributed.checkpoint` that its documentation does not have.

>>> import torch
>>> ChunkStorageMetadata(torch.Size([0]), torch.Size([2])).sizes
torch.Size([2])
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .declared import NAMES

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import (
        STATE_DICT_TYPE,
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
    )
    from torch.distributed.checkpoint.planner import LoadItemType, WriteItemType
    from torch.distributed.checkpoint.storage import WriteResult
else:
    _WITHOUT = "torch's own checkpoints (`torch.distributed.checkpoint`) raise"
    _ANNOTATES = "nothing changes: annotations name it, and no code reads it"

    def _bind(name: str, why: str, **options: Any) -> Any:
        path = f"torch.distributed.checkpoint.{name}"
        return NAMES.bind(path, why=why, **{"without": _WITHOUT, **options})

    BytesStorageMetadata = _bind("metadata.BytesStorageMetadata", "is of a pickled value")
    ChunkStorageMetadata = _bind("metadata.ChunkStorageMetadata", "is of a slice of a tensor")
    MetadataIndex = _bind("metadata.MetadataIndex", "is the name of such a slice")
    LoadItemType = _bind("planner.LoadItemType", "distinguishes a pickled value from a tensor")
    WriteItemType = _bind("planner.WriteItemType", "says that a slice is written")
    Metadata = _bind("metadata.Metadata", "is of a checkpoint", otherwise=Any, without=_ANNOTATES)
    STATE_DICT_TYPE = _bind(
        "metadata.STATE_DICT_TYPE", "is the type of a state dict", otherwise=Any, without=_ANNOTATES
    )
    WriteResult = _bind(
        "storage.WriteResult", "is what a write came to", otherwise=Any, without=_ANNOTATES
    )
