"""torch in core's registry: all verbs of core, each delegated to the room that implements it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from jax.sharding import Mesh

from isoshard.core import extensions
from isoshard.core.checkpoint.source import Source
from isoshard.core.checkpoint.store import Sum
from isoshard.core.errors import ShardingError
from isoshard.core.frameworks import register
from isoshard.core.runtime._jax_internals import reject_values
from isoshard.core.traced.traced_step import TracedStep

from .dtensor import spelling, starting
from .engine.capture.step import CompiledStep
from .framework.framework import Torch
from .spmd import on_request as _on_request  # noqa: F401  (steps that are to be laid out)
from .state.filling import Filler
from .state.torch_state import StateVerbs


class RegisteredTorch(StateVerbs, Torch):
    """Core's verbs for tensors, modules and optimizers of torch."""

    def call(self, verb: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `domain.torch_verbs`."""
        return extensions.call_domain_verb(verb, args, kwargs)

    def owns_step(self, step: Any) -> bool:
        """A step of `xs.compile`; others are recognized by what they hold."""
        return isinstance(step, CompiledStep)

    def traced_step(
        self, step: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], mesh: Mesh, plan: Any
    ) -> TracedStep:
        """See `planner.torch_steps`."""
        return extensions.traced_torch_step(step, args, kwargs, mesh, plan)

    def processes_joined(self) -> tuple[int, int] | None:
        """Rank and size of the default process group."""
        return starting.joined()

    def start_processes(
        self,
        rank: int,
        size: int,
        *,
        timeout: float,
        post: Callable[[str | None], str] | None = None,
        host: str = "",
        device: int | None = None,
    ) -> None:
        """Start the default process group."""
        starting.join(rank, size, timeout=timeout, post=post, host=host, device=device)

    def broadcast_message(self, word: str | None) -> str:
        """Send rank 0's word to all ranks."""
        return starting.broadcast_word(word)

    def end_processes(self) -> None:
        """End the default process group."""
        starting.leave()

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


def _no_array(tensor: torch.Tensor) -> NoReturn:
    raise ShardingError(
        f"JAX computes with arrays, and got a torch tensor of shape {tuple(tensor.shape)} on "
        f"{tensor.device}; pass iso.to_jax(tensor), which shares the memory, or call torch code "
        "from JAX by iso.jax_function(f)"
    )


register(RegisteredTorch())
reject_values(torch.Tensor, _no_array)
spelling.register()
