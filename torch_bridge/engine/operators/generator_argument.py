"""Random operations with a `generator=` argument.

The generator is taken out of the arguments, and the operation draws from its state. Operators
without such an argument are not touched, so nothing is paid for it in a model.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from isoshard.torch_bridge._torch_internals import OpOverload, schema_of
from isoshard.torch_bridge.engine.recording import random_state
from isoshard.torch_bridge.engine.recording import tape as tapes

_STATES: weakref.WeakValueDictionary[int, random_state.RandomState] = weakref.WeakValueDictionary()


def introduce(generator: torch.Generator, state: random_state.RandomState) -> None:
    """Let `generator` represent `state`, which must live no longer than the generator."""
    _STATES[id(generator)] = state


def honour(func: OpOverload, handler: Callable[..., Any]) -> Callable[..., Any]:
    """A handler that draws from a call's generator; `handler` itself if `func` takes none."""
    names = [
        (index, argument.name)
        for index, argument in enumerate(schema_of(func).arguments)
        if "Generator" in str(argument.type)
    ]
    if not names:
        return handler
    ((index, name),) = names

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        generator = args[index] if len(args) > index else kwargs.get(name)
        if generator is None:
            return handler(args, kwargs)
        if len(args) > index:
            args = (*args[:index], None, *args[index + 1 :])
        else:
            kwargs = {**kwargs, name: None}
        with random_state.drawing_from(_state(func, generator)):
            return handler(args, kwargs)

    return run


def _state(func: Any, generator: torch.Generator) -> random_state.RandomState:
    state = _STATES.get(id(generator))
    if state is None:
        raise RuntimeError(
            f"{func}: Expected a 'jax' device type for generator but found '{generator.device}'; "
            "make one with isoshard.torch_bridge.Generator().manual_seed(seed)"
        )
    if tapes.is_tracing():
        raise RuntimeError(
            f"{func} has a generator inside a function that JAX traces, which would draw the same "
            "numbers in every call; leave generator= out there and pass rng=jax.random.key(seed) "
            "when you call the function"
        )
    return state
