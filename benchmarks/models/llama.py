"""A Llama of `transformers` by its configuration, unmodified, AdamW.

Grouped-query attention, rotary positions, RMSNorm and a gated MLP; the head is not tied to the
embedding.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import torch

from benchmarks.models import gpt2
from benchmarks.models.problem import Problem

LEARNING_RATE, EPSILON, THETA = 3e-4, 1e-6, 10_000.0


@dataclasses.dataclass(frozen=True)
class Size:
    """Extents of the model and of a batch; the defaults are half the layers of Llama 3.2 1B.

    Eight of its sixteen layers, and the vocabulary of Llama 2, so that a program compiles in a
    short time; width, heads and MLP are those of the published model.
    """

    layers: int = 8
    width: int = 2048
    hidden: int = 8192
    heads: int = 32
    kv_heads: int = 8
    vocabulary: int = 32000
    length: int = 1024
    batch: int = 8


def build(size: Size, **changes: Any) -> torch.nn.Module:
    """A `LlamaForCausalLM` with random weights.

    Args:
        size: of the model.
        **changes: more fields of its configuration.
    """
    import transformers  # slow to import

    config = transformers.LlamaConfig(
        hidden_size=size.width,
        intermediate_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        vocab_size=size.vocabulary,
        max_position_embeddings=size.length,
        rms_norm_eps=EPSILON,
        **changes,
    )
    return transformers.LlamaForCausalLM(config)


def loss(module: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of the next token."""
    return module(input_ids=tokens, labels=tokens).loss


def batch(size: Size, number: int) -> tuple[np.ndarray, ...]:
    """Sequences that count upwards in random strides, as those of `gpt2`."""
    extents = {"vocabulary": size.vocabulary, "length": size.length, "batch": size.batch}
    tokens, _ = gpt2.batch(gpt2.Size(**extents), number)
    return (tokens,)


def problem(size: Size) -> Problem:
    """The training problem at this size."""
    return Problem(
        name="llama",
        size=size,
        build=lambda: build(size, use_cache=False),
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=LEARNING_RATE),
        max_norm=None,
        specs=(),
        batch_spec=("data",),
        batch=functools.partial(batch, size),
    )
