"""torch in core's registry: all verbs of core's, each done where its idea is at home."""

from __future__ import annotations

from typing import Any

from isoshard.core.checkpoint.manifest import Sum
from isoshard.core.checkpoint.source import Source
from isoshard.core.frameworks import register

from . import domain
from .dtensor import spelling, starting
from .framework import Torch
from .state import torch_state
from .state.filling import Filler


class RegisteredTorch(Torch):
    """What core's verbs meet when they are given tensors, modules or optimizers."""

    stored = staticmethod(torch_state.stored)
    wanted = staticmethod(torch_state.wanted)
    processes_joined = staticmethod(starting.joined)
    start_processes = staticmethod(starting.join)
    tell_processes = staticmethod(starting.tell_all)
    end_processes = staticmethod(starting.leave)
    call = staticmethod(domain.call)
    parts = staticmethod(torch_state.parts_of)

    def filled(self, x: Any, values: dict[str, Any]) -> Any:
        """See `Filler.fill`."""
        return Filler(self.place).fill(x, values)

    def open_checkpoint(self, path: str) -> Source | None:
        """A folder of `torch.distributed.checkpoint`."""
        from .checkpoints import torch_folder  # its import takes 2 s

        return torch_folder.opened(path)

    def write_checkpoint(self, folder: str, name: str, leaves: dict[str, Any]) -> dict[str, Sum]:
        """A folder that `torch.distributed.checkpoint` reads."""
        from .checkpoints import torch_folder

        return torch_folder.write(folder, name, leaves)


register(RegisteredTorch())
spelling.register()
