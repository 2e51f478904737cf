"""A static cache whose layers hold all tokens, and whose length is known to the host.

`transformers` is imported here, and this module only where a program has imported it.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import torch
from transformers.cache_utils import StaticCache, StaticLayer, StaticSlidingWindowLayer

from isoshard.core.transfer.exchange import to_torch
from isoshard.torch_bridge.common.dtypes import physical_dtype
from isoshard.torch_bridge.engine.recording.recorder import recorder, replace
from isoshard.torch_bridge.engine.recording.tape import Tape
from isoshard.torch_bridge.spmd import mark_sharding

from .cache_sharding import cache_sharding

PLAIN = (StaticLayer, StaticSlidingWindowLayer)
"""Layers of `transformers` that a `FullLayer` can stand for."""


class FullLayer(StaticLayer):
    """The keys and values of all tokens of one layer, (rows, heads, tokens, size).

    A layer with a sliding window holds them all, too: the mask says which of them it attends to.
    """

    is_croppable = True
    split: jax.sharding.NamedSharding | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the keys and values of new tokens after those that the cache holds."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        count = key_states.shape[-2]
        positions = torch.arange(count, device=self.device) + self.cumulative_length
        keys: Any = self.keys
        values: Any = self.values
        keys.index_copy_(2, positions, key_states)
        values.index_copy_(2, positions, value_states)
        return keys, values


class FullCache(StaticCache):
    """A static cache on the device, all of whose layers have one length.

    Args:
        model: a causal language model of `transformers` on the device.
        rows: of a batch.
        size: tokens that it can hold for each row.
        split: how the rows are sharded; None on one device.

    Attributes:
        size: the same as the argument.
        seen: the number of tokens that it holds.
        length: the same on the device, a scalar that programs read and write.
        order: the row from which each row continues; None for the same. A `Decoder` applies it with
            the next tokens.
    """

    def __init__(self, model: Any, rows: int, size: int, split: jax.sharding.NamedSharding | None):
        """See the class."""
        config = model.config.get_text_config(decoder=True)
        super().__init__(config=config, max_cache_len=size)
        self.size, self._model_device = size, model.device
        self.layers: Any = [FullLayer(max_cache_len=size) for _ in self.layers]
        self.order: torch.Tensor | None = None
        self.seen, self._runs = 0, False
        with _discarded(), torch.no_grad():  # shapes and dtypes are those that the model computes
            ids = torch.zeros((rows, 1), dtype=torch.int64, device=model.device)
            model(input_ids=ids, past_key_values=self, use_cache=True)
        for layer in self.layers:
            keys: Any = layer.keys
            layer.split = None if split is None else cache_sharding(model, keys.shape[1], split)
        self._allocate()

    def like(self) -> FullCache:
        """An empty one of the same shapes."""
        other = copy.copy(self)
        other.layers = [copy.copy(layer) for layer in self.layers]
        other.seen, other.order = 0, None
        other._allocate()
        return other

    def _allocate(self) -> None:
        self.length = torch.tensor(0).to(self._model_device)
        for layer in self.layers:
            for name in ("keys", "values"):
                state = getattr(layer, name)
                dtype = physical_dtype(state.dtype)
                zeros = to_torch(jnp.zeros(state.shape, dtype, device=layer.split))
                if layer.split is not None:
                    mark_sharding(zeros, layer.split.mesh, tuple(layer.split.spec))
                setattr(layer, name, zeros)
            layer.cumulative_length = self.length

    def swap(self, other: FullCache) -> None:
        """Exchange what two caches of the same shapes hold, without copies."""
        for layer, others in zip(self.layers, other.layers, strict=True):
            for name in ("keys", "values"):
                first, second = getattr(layer, name)._storage, getattr(others, name)._storage
                first.value, second.value = second.value, first.value
        self.seen, other.seen = other.seen, self.seen
        self.order, other.order = other.order, self.order

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Context in which the model reads the length on the device."""
        self._runs = True
        try:
            yield
        finally:
            self._runs = False

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """The number of tokens that it holds, on the device while the model runs."""
        return self.length if self._runs else self.seen

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens.

        Raises:
            ValueError: it is positive.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop takes the tokens to remove as a negative number, and got {tokens_to_remove}"
            )
        self.seen = max(self.seen + tokens_to_remove, 0)

    def reset(self) -> None:
        """Remove all tokens."""
        self.seen, self.order = 0, None

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Continue each row from another one."""
        self.order = beam_idx.cpu() if self.order is None else self.order[beam_idx.cpu()]


@contextlib.contextmanager
def _discarded() -> Iterator[None]:
    """Operations inside are recorded, and never run."""
    outer, tape = recorder(), Tape()
    tape.opened = True
    replace(tape)
    try:
        yield
    finally:
        replace(outer)
        tape.forget()
