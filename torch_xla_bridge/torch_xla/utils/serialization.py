"""Saving with one file for each tensor.

`save(data, "model.pt")` writes the structure to `model.pt` and tensor number 3 to
`model.pt.tensors/tensor_3.pt`, as torch_xla does.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from isoshard.torch_bridge.kit import lazy_tensor
from isoshard.torch_xla_bridge.session import host_transfer
from isoshard.torch_xla_bridge.session.nested_search import ToXlaTensorArena
from isoshard.torch_xla_bridge.session.replicas import is_master_ordinal


class TensorReference:
    """Stands for a tensor in the saved structure.

    Args:
        tid: number of the tensor.
    """

    def __init__(self, tid: int):
        """See the class."""
        self.tid = tid


def save(
    data: Any, path: str | Path, master_only: bool = True, global_master: bool = False
) -> None:
    """Save data, one file for each tensor on the device.

    Args:
        data: any nesting of tensors, containers and objects.
        path: the file of the structure; the tensors are in the folder `path + ".tensors"`.
        master_only: only masters write.
        global_master: only process 0 is a master, not one process of each machine.
    """
    if master_only and not is_master_ordinal(local=not global_master):
        return
    folder = _folder(path)
    folder.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:

        def write(tensors: list[Any]) -> list[TensorReference]:
            for index, tensor in enumerate(host_transfer.to_cpu(tensors)):
                torch.save(tensor, new / _file(index))
            return [TensorReference(index) for index in range(len(tensors))]

        arena = ToXlaTensorArena(write, lambda value: isinstance(value, lazy_tensor.LazyTensor))
        references = arena.transform(data)
        new.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        new.replace(folder)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    host_transfer.save(references, path)


def load(path: str | Path) -> Any:
    """Load what `save` wrote, with its tensors on the CPU.

    The structure is unpickled, which runs code that the file names: load only what you trust.

    Args:
        path: the file of the structure.
    """
    folder = _folder(path)

    def read(references: list[Any]) -> list[Any]:
        return [torch.load(folder / _file(reference.tid)) for reference in references]

    arena = ToXlaTensorArena(read, lambda value: isinstance(value, TensorReference))
    return arena.transform(torch.load(path, weights_only=False))


def _folder(path: str | Path) -> Path:
    return Path(f"{path}.tensors")


def _file(index: int) -> str:
    return f"tensor_{index}.pt"
