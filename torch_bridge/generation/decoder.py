"""A causal language model with a static cache: one program for a prompt, one for a token.

A `Decoder` belongs to a model, a number of rows and a size of the cache. Its two steps are captured
once and write to the cache in place, so its memory is donated from token to token. A prompt is
padded on the right to a length bucket: causal attention does not look ahead, and the next tokens
overwrite what the padding left in the cache.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import torch

from isoshard.torch_bridge._torch_internals import pytree
from isoshard.torch_bridge.engine.capture.replay import Replay
from isoshard.torch_bridge.engine.capture.step import CompiledStep
from isoshard.torch_bridge.engine.recording.lazy_tensor import LazyTensor
from isoshard.torch_bridge.spmd import mark_sharding

from .full_cache import FullCache

FINEST = 32
"""Lengths are padded to a multiple of this, or of an eighth of the next power of two."""


def length_bucket(length: int) -> int:
    """The length to which a prompt or a cache is padded: from 256 on, at most a quarter more.

    >>> [length_bucket(n) for n in (1, 32, 33, 300, 4000, 5000)]
    [32, 32, 64, 320, 4096, 5120]
    """
    step = max(FINEST, (1 << max(length - 1, 0).bit_length()) >> 3)
    return -(-length // step) * step


def row_bucket(rows: int) -> int:
    """The number of rows to which a batch is padded: a power of two.

    >>> [row_bucket(n) for n in (1, 3, 8)]
    [1, 4, 8]
    """
    return 1 << (rows - 1).bit_length()


def token_bucket(count: int) -> int:
    """The number of tokens to which those of one call are padded: powers of two up to a prompt.

    >>> [token_bucket(n) for n in (1, 3, 20, 33)]
    [1, 4, 32, 64]
    """
    return min(1 << (count - 1).bit_length(), length_bucket(count))


class Decoder:
    """Runs a model over one cache.

    Args:
        model: a causal language model of `transformers`, on the `jax` device.
        rows: of a batch.
        size: tokens that the cache holds for each row.
        split: how the rows of a batch are sharded; None on one device.

    Attributes:
        cache: its own, a `FullCache`.
    """

    def __init__(self, model: Any, rows: int, size: int, split: jax.sharding.NamedSharding | None):
        """Create the cache."""
        self._model, self._split, self._rows = model, split, rows
        self.cache = FullCache(model, rows, size, split)
        self._prefill_step = CompiledStep(_prefill)
        self._decode_step = CompiledStep(_decode)
        self._forward_step = CompiledStep(_forward)
        self._replay: Replay | None = None
        self._key: Any = None

    @contextlib.contextmanager
    def holding(self, cache: FullCache) -> Iterator[None]:
        """Context in which the decoder's own cache holds what another one holds.

        The programs refer to the decoder's own, so a cache that a caller brings costs none.
        """
        self.cache.swap(cache)
        try:
            yield
        finally:
            self.cache.swap(cache)

    def prefill(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor
    ) -> tuple[LazyTensor, LazyTensor]:
        """Empty the cache and run a prompt.

        Args:
            ids: token ids, integers of shape (rows, length), on the CPU.
            positions: of the tokens, of the same shape.
            mask: 1 where there is a token, of the same shape.

        Returns:
            The logits of the next token, float32 of shape (rows, vocabulary), and the likeliest
            tokens, of shape (rows, 1).
        """
        length = ids.shape[1]
        columns = min(length_bucket(length), self.cache.size) - length
        pad = torch.nn.functional.pad
        end = positions[:, -1:] + 1
        positions = torch.cat([positions, end + torch.arange(columns)], dim=-1)
        self._mask = self._upload(pad(mask.bool(), (0, self.cache.size - length), value=True))
        self._positions = self._upload(end)
        self._replay = self._key = None
        self.cache.seen = length
        with self.cache.running():
            return self._prefill_step(
                self._model,
                self.cache,
                self._upload(pad(ids, (0, columns))),
                self._upload(positions),
                self._mask,
                torch.tensor(length).to(self._model.device),
            )

    def decode(self, tokens: Any, *, checked: bool) -> tuple[LazyTensor, LazyTensor]:
        """Run one more token of each row.

        Args:
            tokens: integers of shape (rows, 1), on the CPU or as a call returned them.
            checked: whether to test the guards of the program; not needed where no code but that of
                the decoder ran since the last call.

        Returns:
            As of `prefill`.
        """
        if not isinstance(tokens, LazyTensor):
            tokens = self._upload(tokens)
        arguments: Any = [tokens, self._positions, self._mask]
        key = [(argument._aval, argument._storage.value.layout) for argument in arguments]
        self.cache.seen += 1
        if not checked and self._replay is not None and key == self._key:
            logits, tokens, self._positions = self._replay(arguments)
            return logits, tokens
        with self.cache.running():
            logits, tokens, self._positions = self._decode_step(self._model, self.cache, *arguments)
        self._replay, self._key = self._decode_step.last, key
        return logits, tokens

    def forward(self, **inputs: Any) -> Any:
        """Run the model for a loop of `transformers`, which reads the logits on the CPU.

        Args:
            inputs: of the model, on the CPU.

        Returns:
            Its `ModelOutput`, with the logits on the CPU.
        """
        passed, cache = inputs.pop("past_key_values"), self.cache
        inputs = {name: value for name, value in inputs.items() if value is not None}
        count = inputs["input_ids"].shape[1]
        bucket = count
        if not (inputs.get("output_hidden_states") or inputs.get("output_attentions")):
            bucket = token_bucket(count)
            bucket = bucket if cache.seen + bucket <= self.cache.size else count
        if bucket != count:
            inputs = pytree.tree_map(functools.partial(_padded, count, bucket), inputs)
        kept = inputs.get("logits_to_keep", 0)
        if kept:
            inputs["logits_to_keep"] = torch.arange(count - kept, count)
        step_inputs = pytree.tree_map(self._placed, inputs)
        length = torch.tensor(cache.seen).to(self._model.device)
        order = None if cache.order is None else cache.order.to(self._model.device)
        is_first = cache.seen == 0
        with cache.running():
            output = self._forward_step(self._model, cache, length, order, step_inputs, is_first)
        cache.seen, cache.order = cache.seen + count, None
        output.logits = on_host(output.logits)[:, : None if kept else count]
        output.past_key_values = passed
        return output

    def _upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the prompt's rows on the device, with the rows of the decoder."""
        missing = self._rows - tensor.shape[0]
        if missing:
            tensor = torch.cat([tensor, tensor[:1].expand(missing, *tensor.shape[1:])])
        return self._placed(tensor)

    def _placed(self, tensor: Any) -> Any:
        """A tensor on the device, with its rows sharded; anything else as it is."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        tensor = tensor.to(self._model.device)
        if self._split is not None and tensor.dim() > 1 and tensor.shape[0] == self._rows:
            rest = (None,) * (tensor.dim() - 1)
            mark_sharding(tensor, self._split.mesh, (*self._split.spec, *rest))
        return tensor


def on_host(tensor: LazyTensor) -> torch.Tensor:
    """A computed tensor as a CPU tensor, without an operation of torch."""
    return torch.from_numpy(np.array(tensor._storage.value.array))


def _padded(count: int, bucket: int, value: Any) -> Any:
    """An input of `count` tokens with `bucket`; the last token of a mask again."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.dim() == 4 and value.shape[-2] == count:
        last = value[..., -1:, :]
        return torch.cat([value, last.expand(*last.shape[:2], bucket - count, -1)], dim=-2)
    if value.dim() > 1 and value.shape[-1] == count:
        return torch.nn.functional.pad(value, (0, bucket - count))
    return value


def _empty(cache: Any) -> None:
    for layer in cache.layers:
        for state in (layer.keys, layer.values):
            state.zero_()  # what is masked is multiplied by 0, which a NaN would survive


def _prefill(model: Any, cache: Any, ids: Any, positions: Any, mask: Any, length: Any) -> Any:
    with torch.no_grad():
        _empty(cache)
        cache.length.zero_()
        output = model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=(length - 1).reshape(1),
        )
        cache.length.copy_(length)
        return _last(output.logits)


def _decode(model: Any, cache: Any, tokens: Any, positions: Any, mask: Any) -> Any:
    with torch.no_grad():
        output = model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
        )
        cache.length.add_(1)
        return *_last(output.logits), positions + 1


def _forward(
    model: Any,
    cache: Any,
    length: Any,
    order: Any,
    inputs: Any,
    is_first: bool,
) -> Any:
    with torch.no_grad():
        if is_first:
            _empty(cache)
        cache.length.copy_(length)
        if order is not None:
            for layer in cache.layers:
                layer.keys.copy_(layer.keys.index_select(0, order))
                layer.values.copy_(layer.values.index_select(0, order))
        output = model(**inputs, past_key_values=cache)
        output.past_key_values = None
        return output


def _last(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits = logits[:, -1].float()
    return logits, logits.argmax(-1, keepdim=True)
