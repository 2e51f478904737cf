"""Data that leaves the device, and data that comes to it, in any nesting."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import IO, Any

import torch

from isoshard.torch_bridge.kit import lazy_tensor, naming
from isoshard.torch_bridge.kit import tape as tapes

from .nested_search import ToXlaTensorArena


def to_cpu(data: Any) -> Any:
    """The same structure with tensors on the CPU."""
    return ToXlaTensorArena(_fetched, _is_ours).transform(data)


def _is_ours(value: Any) -> bool:
    return isinstance(value, lazy_tensor.LazyTensor)


def _fetched(tensors: list[Any]) -> list[torch.Tensor]:
    tapes.materialize([lazy_tensor.read(tensor) for tensor in tensors])  # all as one program
    return [_on_cpu(tensor) for tensor in tensors]


def _on_cpu(tensor: Any) -> torch.Tensor:
    host = tensor.detach().cpu()
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(host, requires_grad=tensor.requires_grad)
    return host.requires_grad_(tensor.requires_grad)


def save(data: Any, file_or_path: str | os.PathLike[str] | IO[bytes]) -> None:
    """`torch.save` of the data, moved to the CPU.

    A file is written beside its place and then renamed, so that an interrupted save leaves the old
    file as it was.

    Args:
        data: see `to_cpu`.
        file_or_path: a path, or an open binary file.
    """
    data = to_cpu(data)
    if not isinstance(file_or_path, str | os.PathLike):
        torch.save(data, file_or_path)
        return
    path = Path(file_or_path)
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~_umask()
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            torch.save(data, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(mode)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def send(datas: Any, device: str | torch.device, input_sharding: Any = None) -> Any:
    """The same structure with its CPU tensors on the device.

    Raises:
        RuntimeError: `device` is another one; or `input_sharding` is for minibatches, and a batch
            cannot be divided by the number of this process's chips.
    """
    if torch.device(device).type not in naming.OURS:
        raise RuntimeError(
            f"data is sent to {naming.current()}, not to {str(device)!r}; use tensor.to(device) "
            "for that"
        )

    def convert(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        if input_sharding is not None and getattr(input_sharding, "minibatch", False):
            _check_minibatch(tensors, input_sharding)
        return [_on_device(tensor, input_sharding) for tensor in tensors]

    def select(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.device.type == "cpu"

    return ToXlaTensorArena(convert, select).transform(
        [datas] if isinstance(datas, torch.Tensor) else datas
    )


def _on_device(tensor: torch.Tensor, input_sharding: Any) -> torch.Tensor:
    moved = tensor.detach().to(naming.current())
    if input_sharding is not None and input_sharding.can_apply(moved):
        input_sharding.apply(moved)
    return moved.requires_grad_(tensor.requires_grad)


def _check_minibatch(tensors: list[torch.Tensor], input_sharding: Any) -> None:
    import jax

    count = len(jax.local_devices())
    for tensor in tensors:
        if tensor.dim() and input_sharding.can_apply(tensor) and tensor.shape[0] % count:
            raise RuntimeError(
                f"a minibatch of shape {tuple(tensor.shape)} cannot be divided among the {count} "
                "devices of this process: with minibatch=True the batch size must be a multiple "
                f"of {count}"
            )
