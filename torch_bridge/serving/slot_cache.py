"""A key/value cache with a slot for each sequence, for models of `transformers`.

A static cache has one length for all of its rows. Here each row, a slot, has a length of its own,
so a sequence may end and another take its slot while the others go on, in the same program:

    cache = SlotCache(model, slots=8, max_length=2048)
    model(ids, past_key_values=cache.prefill(slot, length), ..)             # a prompt into a slot
    model(tokens, past_key_values=cache.decode(positions),                  # a token for each slot
          attention_mask=cache.decode_masks(positions), ..)

A prompt is padded on the right to the length of a bucket; what the padding writes is overwritten
before any query can see it. Layers with a sliding window or with chunks keep one window, as a ring:
the state of position p is stored at p modulo the window.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import jax
import torch
from jax.sharding import PartitionSpec
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    StaticCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from isoshard import core
from isoshard.core.errors import DeviceError
from isoshard.core.layout.spec import axis_names

from ..common import naming
from ..interop.calling_jax import TorchFunction
from ..tensors.tensor import XLAShardedTensor
from ..trainers.batches import batch_axes


class SlotCache(Cache):
    """Keys and values of `slots` sequences, each of its own length.

    Its tensors are `[slots, key/value heads, positions, width]`, of the shapes and dtypes that the
    model itself writes: its forward is recorded once, and not run.

    Args:
        model: of `transformers`, on the `jax` device, of attention layers only.
        slots: how many sequences.
        max_length: of a sequence: prompt and new tokens.
        spec: of the tensors, on the model's mesh. By default slots are split over the mesh axis
            "data", if the mesh has it, and heads over the axes by which the plan splits the output
            features of a layer's attention, each where it divides.

    Attributes:
        slots: see above.
        max_length: see above.

    Raises:
        DeviceError: the model is not on the `jax` device.
        ValueError: it has layers of another kind.
        SpecError: `spec` does not fit.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32,
        ...     num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
        >>> cache = SlotCache(LlamaForCausalLM(config).to("jax"), slots=3, max_length=24)
        >>> len(cache.layers), cache.layers[0].keys.shape
        (2, torch.Size([3, 2, 24, 4]))
    """

    def __init__(self, model: torch.nn.Module, slots: int, max_length: int, spec: Any = None):
        """See the class."""
        _check_device(model)
        if slots < 1 or max_length < 2:
            raise ValueError(
                f"a SlotCache has at least 1 slot and 2 positions, not slots={slots}, "
                f"max_length={max_length}"
            )
        self.slots, self.max_length = slots, max_length
        layers = _layers(model, max_length)
        self._several_kinds = len({layer.kind for layer in layers}) > 1
        for index, states in enumerate(_probe(model, len(layers))):
            if states is None:
                raise ValueError(f"layer {index} of {type(model).__name__} has stored no keys")
            layer = layers[index]
            layer.keys, layer.values = (
                self._allocate(model, index, layer.size, state, spec) for state in states
            )
            layer.is_initialized = True
        super().__init__(layers=layers)
        self.layers: Any

    def prefill(self, slot: torch.Tensor, length: torch.Tensor) -> Cache:
        """The cache for the forward of one prompt, `past_key_values=`.

        Args:
            slot: [] or [1], integer: where the prompt goes.
            length: [] or [1], integer: its tokens without padding, at most those of the input.

        Returns:
            A cache that looks empty to the model, so `attention_mask` is None; what it receives is
            stored in the slot.
        """
        return Cache(layers=[_PrefillLayer(layer, slot, length) for layer in self.layers])

    def decode(self, positions: torch.Tensor) -> Cache:
        """The cache for the forward of one token in each slot, `past_key_values=`.

        Args:
            positions: [slots], integer: of the tokens, each below `max_length`.
        """
        return Cache(layers=[_DecodeLayer(layer, positions) for layer in self.layers])

    def decode_masks(self, positions: torch.Tensor) -> Any:
        """What each slot's token sees, `attention_mask=` of the same forward.

        Args:
            positions: see `decode`.

        Returns:
            What is added to the scores, `[slots, 1, 1, positions of a layer]`; for a model with
            several kinds of layers a dictionary by kind, as transformers' own.
        """
        masks = {layer.kind: layer.mask(positions) for layer in self.layers}
        return masks if self._several_kinds else next(iter(masks.values()))

    def _allocate(
        self, model: torch.nn.Module, index: int, size: int, state: torch.Tensor, spec: Any
    ) -> torch.Tensor:
        shape = (self.slots, state.shape[1], size, state.shape[3])
        mesh = mesh_of(model)
        if mesh is None:
            return torch.zeros(shape, dtype=state.dtype, device=state.device)
        chosen = _default_spec(model, index, mesh, shape) if spec is None else spec
        return core.shard(torch.zeros(shape, dtype=state.dtype), mesh, chosen)


class _SlotLayer(CacheLayerMixin):
    """The storage of one layer.

    Args:
        kind: of the layer, by transformers' names.
        size: positions that it stores, in a ring if there are fewer than `max_length`.
        max_length: of a sequence.
        chunks: whether a query sees its own chunk of `size` positions, not the last `size`.
    """

    is_compileable = True
    is_sliding = False
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, kind: str, size: int, max_length: int, chunks: bool = False):
        super().__init__()
        self.kind, self.size, self.max_length, self.chunks = kind, size, max_length, chunks

    def mask(self, positions: torch.Tensor) -> torch.Tensor:
        """What is added to the scores of a token at each slot's position."""
        last = positions % self.size if self.chunks else positions
        seen = torch.arange(self.size, device=positions.device) <= last[:, None]
        mask = torch.zeros(seen.shape, dtype=self.keys.dtype, device=seen.device)
        return mask.masked_fill(~seen, torch.finfo(mask.dtype).min)[:, None, None, :]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: the storage is there."""

    def update(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Raises: the positions are missing."""
        raise TypeError(
            "a SlotCache does not know where these keys go; pass past_key_values="
            "cache.prefill(slot, length) or cache.decode(positions)"
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """All that is stored."""
        return self.size, 0

    def get_seq_length(self) -> int:
        """0: the length of a slot is its owner's to know."""
        return 0

    def get_max_length(self) -> int:
        """Positions of a sequence."""
        return self.max_length


class _PrefillLayer(_SlotLayer):
    """A layer that stores a prompt in one slot."""

    def __init__(self, layer: _SlotLayer, slot: torch.Tensor, length: torch.Tensor):
        super().__init__(layer.kind, layer.size, layer.max_length, layer.chunks)
        self._layer, self._slot, self._length = layer, slot, length

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store what the slot needs of them; the prompt itself attends to all of them."""
        for stored, states in ((self._layer.keys, key_states), (self._layer.values, value_states)):
            written = self._last(states)
            row = self._slot.reshape(1).long()
            width = written.shape[2]
            stored[:, :, :width].index_copy_(0, row, written.to(stored.dtype))
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The prompt alone."""
        return query_length, 0

    def _last(self, states: torch.Tensor) -> torch.Tensor:
        if states.shape[2] <= self.size:
            return states
        # index j of the ring has the last position of the prompt that is j modulo its size
        last = self._length - 1
        index = torch.arange(self.size, device=states.device)
        positions = (last - (last - index) % self.size).clamp(min=0)
        return states.index_select(2, positions.long())


class _DecodeLayer(_SlotLayer):
    """A layer that stores one token's states in each slot."""

    def __init__(self, layer: _SlotLayer, positions: torch.Tensor):
        super().__init__(layer.kind, layer.size, layer.max_length, layer.chunks)
        self._layer, self._positions = layer, positions

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store them, and return all that is stored."""
        index = self._positions % self.size
        for stored, states in ((self._layer.keys, key_states), (self._layer.values, value_states)):
            stored.copy_(_written(stored, states.to(stored.dtype), index))
        return self._layer.keys, self._layer.values


def _write(stored: jax.Array, states: jax.Array, index: jax.Array) -> jax.Array:
    """Each slot's states at its index. Batched, so no device needs another's slots.

    torch's `stored[rows, :, index] = ..` is a scatter whose rows are data to the compiler, which
    gathers indices and states for it: four collectives a layer.
    """
    write = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=1)
    return jax.vmap(write)(stored, states, index)


_written = TorchFunction(_write, "write_slots")


class _ProbeLayer(_SlotLayer):
    """A layer that keeps what it receives."""

    def __init__(self) -> None:
        super().__init__("probe", 1, 1)
        self.states: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep them."""
        self.states = (key_states, value_states)
        return self.states


def takes_logits_to_keep(model: torch.nn.Module) -> bool:
    """Whether the model can compute the logits of some positions only."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def _check_device(model: Any) -> None:
    device = next(model.parameters()).device
    if device.type != naming.current().type:
        raise DeviceError(
            f"a SlotCache serves a model on the {naming.current().type} device, and this one is on "
            f"{device}: model.to('jax'), or isoshard.shard(model, mesh, plan)"
        )


def _layers(model: Any, max_length: int) -> list[Any]:
    """Storage for each layer of the model, of the size that transformers' static cache has."""
    config = model.config.get_text_config(decoder=True)
    static: list[Any] = StaticCache(config=config, max_cache_len=max_length).layers
    kinds = getattr(config, "layer_types", None) or ["attention"] * len(static)
    chunk = getattr(config, "attention_chunk_size", None)
    layers = []
    for layer, kind in zip(static, kinds, strict=True):
        if type(layer) not in (StaticLayer, StaticSlidingWindowLayer):
            raise ValueError(
                f"a SlotCache holds full, sliding and chunked attention; {type(model).__name__} "
                f"has a layer of {kind} ({type(layer).__name__}): use the model's generate"
            )
        chunks = layer.is_sliding and chunk is not None and "sliding" not in kind
        layers.append(_SlotLayer(kind, layer.max_cache_len, max_length, chunks))
    return layers


def _probe(model: torch.nn.Module, layers: int) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
    """The keys and values of a prompt of one token; on the `jax` device they are only recorded."""
    probes = [_ProbeLayer() for _ in range(layers)]
    device = next(model.parameters()).device
    zeros = torch.zeros((1, 1), dtype=torch.int64, device=device)
    with torch.no_grad():
        model(
            input_ids=zeros,
            position_ids=zeros,
            past_key_values=Cache(layers=list(probes)),
            use_cache=True,
        )
    return [probe.states for probe in probes]


def _default_spec(model: torch.nn.Module, index: int, mesh: Any, shape: Any) -> PartitionSpec:
    data = batch_axes(mesh, "data")
    heads: list[str] = []
    for module in model.modules():
        if getattr(module, "layer_idx", None) == index:
            for child in module.modules():
                heads += [name for name in _output_axes(child) if name not in (*heads, *data)]
    return PartitionSpec(_dividing(data, mesh, shape[0]), _dividing(heads, mesh, shape[1]))


def _output_axes(module: torch.nn.Module) -> tuple[str, ...]:
    """The mesh axes that split the output features of a linear layer."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, XLAShardedTensor) or weight.dim() != 2:
        return ()
    spec = weight.partition_spec or ()
    axis = 0 if isinstance(module, torch.nn.Linear) else 1  # transformers' Conv1D: [in, out]
    return axis_names(spec[axis]) if axis < len(spec) else ()


def _dividing(names: Any, mesh: Any, size: int) -> tuple[str, ...] | None:
    chosen: list[str] = []
    for name in names:
        if size % mesh.shape[name] == 0:
            chosen.append(name)
            size //= mesh.shape[name]
    return tuple(chosen) or None


def mesh_of(model: torch.nn.Module) -> Any:
    """The mesh of a model's parameters, or None."""
    weights = (w for w in model.parameters() if isinstance(w, XLAShardedTensor))
    return next((w.mesh for w in weights if w.mesh is not None), None)
