"""The models that are trained and decoded, in bfloat16, and the FLOPs of a training step.

Weights, activations and optimizer state are bfloat16 in every framework, so that all compute the
same. On a GPU the models have the published sizes, except that the Llama has half the layers; on
the CPU they are tiny.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any
from unittest import mock

import jax
import ml_dtypes
import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.by_hand import models as hand_written
from benchmarks.by_hand.step import ByHand
from benchmarks.models import gpt2, llama, mlp, sizes, vit
from benchmarks.models.problem import Problem
from isoshard.core.errors import ShardingError
from isoshard.planner.machine.chips import chip_of_kind

SIZES: dict[str, dict[str, Any]] = {
    "gpu": {
        **{name: sizes.SIZES[name]["gpu"] for name in ("mlp", "gpt2", "vit")},
        "llama": llama.Size(),
    },
    "cpu": {
        "mlp": mlp.Size(width=32, hidden=64, batch=16),
        "gpt2": gpt2.Size(layers=1, width=48, heads=4, vocabulary=64, length=8, batch=4),
        "vit": vit.Size(layers=1, width=48, heads=4, image=16, patch=4, classes=8, batch=4),
        "llama": llama.Size(
            layers=1, width=32, hidden=64, heads=4, kv_heads=2, vocabulary=64, length=8, batch=4
        ),
    },
}
_PROBLEMS = {"mlp": mlp.problem, "gpt2": gpt2.problem, "vit": vit.problem, "llama": llama.problem}


class Bfloat16Problem(Problem):
    """A problem with weights and floating-point inputs in bfloat16."""

    def module(self) -> torch.nn.Module:
        """The module with its initial parameters."""
        return super().module().to(torch.bfloat16)

    def tensors(self, number: int) -> tuple[torch.Tensor, ...]:
        """Batch `number` as CPU tensors."""
        return tuple(
            tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
            for tensor in super().tensors(number)
        )


def problem(name: str, device: str) -> Problem:
    """A training problem in bfloat16.

    Args:
        name: one of `sections.MODELS`.
        device: "cpu" or "gpu".

    Example:
        >>> problem("mlp", "cpu").module().fc1.weight.dtype
        torch.bfloat16
    """
    return Bfloat16Problem(**vars(_float32_problem(name, device)))


def _float32_problem(name: str, device: str) -> Problem:
    return _PROBLEMS[name](SIZES[device][name])


def by_hand(name: str, device: str) -> ByHand:
    """The hand-written JAX side of `problem(name, device)`.

    Args:
        name: one of `sections.MODELS`.
        device: "cpu" or "gpu".
    """
    work = hand_written.by_hand(_float32_problem(name, device))

    def stored(name: str, array: np.ndarray) -> np.ndarray:
        array = work.stored(name, array)
        return array.astype(ml_dtypes.bfloat16) if array.dtype == np.float32 else array

    def update(params: Any, grads: Any, state: Any) -> Any:
        # AdamW's bias correction is a float32 array, which promotes what it scales. torch casts the
        # result back to the parameter's dtype.
        updated = work.update(params, grads, state)
        return jax.tree.map(lambda new, old: new.astype(old.dtype), updated, (params, state))

    return dataclasses.replace(work, stored=stored, update=update)


def on_meta(problem: Problem) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """The module and a batch of a problem on the `meta` device.

    Args:
        problem: from `problem`.
    """
    with torch.device("meta"):
        module = problem.build().to(torch.bfloat16)
    return module, tuple(tensor.to("meta") for tensor in problem.tensors(0))


def flops(problem: Problem) -> int:
    """The FLOPs of the matrix products and convolutions in a forward and a backward pass.

    Recomputation does not count, and attention counts in full even where it is masked, as in the
    definition of model FLOPs utilisation (PaLM, https://arxiv.org/abs/2204.02311, appendix B).

    Args:
        problem: from `problem`.

    Example:
        An MLP of three layers, whose inputs need no gradient:

        >>> weights = 32 * 64 + 64 * 64 + 64 * 32
        >>> flops(problem("mlp", "cpu")) == 2 * 16 * (3 * weights - 32 * 64)
        True
    """
    module, batch = on_meta(problem)
    with FlopCounterMode(display=False) as counter, _without_packed_sequences(problem):
        problem.loss(module, *batch).backward()
    return counter.get_total_flops()


def _without_packed_sequences(problem: Problem) -> contextlib.AbstractContextManager[Any]:
    """Keep transformers from reading positions, which have no values on the `meta` device."""
    if problem.name != "llama":
        return contextlib.nullcontext()
    from transformers import masking_utils  # slow to import

    # It returns None where each row is one sequence, as here.
    name = "find_packed_sequence_indices"
    return mock.patch.object(masking_utils, name, lambda position_ids: None)


def peak_flops(kind: str) -> float | None:
    """A device's peak FLOP/s in bfloat16; None if the planner has no such chip, or it is a CPU.

    Args:
        kind: JAX's `Device.device_kind`.

    Example:
        >>> peak_flops("NVIDIA H100 80GB HBM3")
        989000000000000.0
        >>> peak_flops("cpu")
    """
    try:
        chip = chip_of_kind(kind)
    except ShardingError:
        return None
    return None if chip.platform == "cpu" else chip.rate("bfloat16")
