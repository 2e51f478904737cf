"""One program of a compiled step for all static caches of one structure.

A captured step refers to the tensors that it reads. In a loop of a user's own each prompt has a new
`transformers.StaticCache`, and would be captured anew. So the step gets a stand-in: a cache of the
same structure, which it keeps, and whose memory is exchanged with that of the cache for the length
of the call, without copies.

A cache that no key was written to yet has no tensors. What the first of its structure looks like
after the call is what the next one is initialized with before it.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import torch
from transformers.cache_utils import StaticCache, StaticLayer

from isoshard.core.transfer.exchange import to_torch
from isoshard.torch_bridge._torch_internals import pytree
from isoshard.torch_bridge.common.dtypes import physical_dtype
from isoshard.torch_bridge.engine.capture import step as capture
from isoshard.torch_bridge.engine.compiling import program
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.recording.immediate import is_tracing
from isoshard.torch_bridge.engine.recording.lazy_tensor import LazyTensor
from isoshard.torch_bridge.engine.recording.recorder import recorder
from isoshard.torch_bridge.engine.values import sharding_ids
from isoshard.torch_bridge.engine.values.value import Value
from isoshard.torch_bridge.layout import marks


class _StandIn(StaticCache):
    """What a step gets; its type is not replaced again."""


class _Structure:
    """What the caches of one structure share in a step.

    Attributes:
        stand_in: the cache that the step gets; None before the first call.
        initialized: of a cache without tensors: one as it was after the first call.
        lock: held while the stand-in has the memory of a cache.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.stand_in: Any = None
        self.initialized: list[dict[str, Any]] | None = None


_STRUCTURES: weakref.WeakKeyDictionary[capture.CompiledStep, dict[Any, _Structure]] = (
    weakref.WeakKeyDictionary()
)
KEPT = 16
"""Structures of a step."""


def run(step: capture.CompiledStep, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a step with a stand-in for its static cache; as it is if it has none of its own kind."""
    leaves, _ = pytree.tree_flatten((args, kwargs))
    caches = list({id(leaf): leaf for leaf in leaves if type(leaf) is StaticCache}.values())
    if len(caches) != 1 or recorder().capture is not None or is_tracing():
        return step.run(args, kwargs)
    (cache,) = caches
    tensors = [leaf for leaf in leaves if isinstance(leaf, LazyTensor)]
    memory = {id(x._storage) for x in _tensors(cache)}
    if any(id(tensor._storage) in memory for tensor in tensors):
        return step.run(args, kwargs)  # it reads the cache's memory beside the cache
    inputs = [tensor._aval for tensor in tensors]
    structure = _structure_of(step, cache, inputs)
    if structure is not None and structure.initialized is not None:
        _initialize(cache, structure.initialized)
        structure = _structure_of(step, cache, inputs)
    if structure is None:
        return step.run(args, kwargs)
    if not _namespaces(cache)[0]["is_initialized"]:  # what a step initializes is captured later
        result = step.run(args, kwargs)
        if all(space["is_initialized"] for space in _namespaces(cache)):
            structure.initialized = [_template(space) for space in _namespaces(cache)]
        return result
    if structure.stand_in is None:
        structure.stand_in = _stand_in(cache)
    stand_in = structure.stand_in

    args, kwargs = _replaced((args, kwargs), cache, stand_in)
    with structure.lock, _exchanged(cache, stand_in):
        result = step.run(args, kwargs)
    return _replaced(result, stand_in, cache)


def _replaced(tree: Any, before: Any, after: Any) -> Any:
    return pytree.tree_map(lambda leaf: after if leaf is before else leaf, tree)


def _namespaces(cache: Any) -> list[dict[str, Any]]:
    return [vars(layer) for layer in cache.layers]


def _tensors(cache: Any) -> list[LazyTensor]:
    values = [x for space in _namespaces(cache) for x in space.values()]
    return [x for x in values if isinstance(x, LazyTensor)]


def _structure_of(step: Any, cache: Any, inputs: list[Any]) -> _Structure | None:
    """Find or create the structure of a cache; None if it is not one that is understood."""
    # A layer with a window counts its tokens in Python: each number would be a structure.
    if not cache.layers or any(type(layer) is not StaticLayer for layer in cache.layers):
        return None
    lazy = _tensors(cache)
    if len({id(x._storage) for x in lazy}) < len(lazy):
        return None
    if any(x._storage.value.tape is not None for x in lazy):
        program.sync()  # a recorded value has no layout yet
    others = {name: x for name, x in vars(cache).items() if name != "layers"}
    spaces = [others, *_namespaces(cache)]
    fields = tuple([_field_key(x) for space in spaces for x in space.values()])
    if None in fields or any(isinstance(x, torch.Tensor) for x in others.values()):
        return None
    names = tuple([tuple(space) for space in spaces])
    key = (names, fields, () if lazy else tuple(inputs))
    structures = _STRUCTURES.setdefault(step, {})
    if key not in structures:
        structures[key] = _Structure()
        if len(structures) > KEPT:
            del structures[next(iter(structures))]
    return structures[key]


def _field_key(value: Any) -> Any:
    """What an attribute contributes to a structure; None if it may not be exchanged."""
    if isinstance(value, LazyTensor):
        owns_storage = value._storage.aval == value._aval and not value.requires_grad
        return (value._aval, value._storage.value.layout) if owns_storage else None
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.item()) if value.numel() == 1 else None
    return (type(value), repr(value))


def _stand_in(cache: Any) -> Any:
    """A cache of the same structure, whose tensors have no memory."""
    stand_in: Any = copy.copy(cache)
    stand_in.__class__ = _StandIn
    stand_in.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in stand_in.layers:
        for name, value in vars(layer).items():
            if isinstance(value, LazyTensor):
                tensor = lazy_tensor.fresh(value._aval, Value())
                marks.copy_mark(value, tensor)
                setattr(layer, name, tensor)
    return stand_in


@contextlib.contextmanager
def _exchanged(cache: Any, stand_in: Any) -> Iterator[None]:
    """Context in which a stand-in has the memory of a cache; then the cache has what became of it.

    What the step assigned to the stand-in is assigned to the cache, and taken back.
    """
    spaces = [vars(stand_in), *_namespaces(stand_in)]
    before = [dict(space) for space in spaces]
    pairs = [
        (own._storage, other._storage)
        for own, other in zip(_tensors(stand_in), _tensors(cache), strict=True)
    ]

    def swap() -> None:
        for first, second in pairs:
            first.value, second.value = second.value, first.value

    swap()
    try:
        yield
    finally:
        swap()
        others = [vars(cache), *_namespaces(cache)]
        for space, own, other in zip(before, spaces, others, strict=True):
            changed = {name: x for name, x in own.items() if space.get(name, _ABSENT) is not x}
            other.update(changed)
            own.clear()
            own.update(space)


_ABSENT = object()


def _template(space: dict[str, Any]) -> dict[str, Any]:
    """A layer's attributes; of its tensors what zeros like them are created by."""

    def described(value: Any) -> Any:
        if not isinstance(value, LazyTensor):
            return value
        layout = value._storage.value.layout
        return _Zeros(value._aval, None if layout == sharding_ids.UNPLACED else layout, value)

    return {name: described(value) for name, value in space.items()}


class _Zeros:
    """Creates zeros like a tensor.

    Args:
        aval: shape and dtype.
        layout: the number of the sharding; None for any.
        like: has the mark.
    """

    def __init__(self, aval: Any, layout: int | None, like: LazyTensor):
        self.aval, self.layout = aval, layout
        self.mark = lazy_tensor.fresh(aval, Value())
        marks.copy_mark(like, self.mark)

    def make(self) -> LazyTensor:
        sharding = None if self.layout is None else sharding_ids.sharding(self.layout)
        dtype = physical_dtype(self.aval.meta.dtype)
        with jax.enable_x64(True):
            zeros: Any = to_torch(jnp.zeros(self.aval.meta.size, dtype, device=sharding))
        marks.copy_mark(self.mark, zeros)
        return zeros


def _initialize(cache: Any, templates: list[dict[str, Any]]) -> None:
    """Give a cache without tensors those that its first call would give it."""
    for space, template in zip(_namespaces(cache), templates, strict=True):
        space.update(
            {name: x.make() if isinstance(x, _Zeros) else x for name, x in template.items()}
        )


capture.STAND_INS[StaticCache] = run
