"""Generators of the `jax` device.

torch makes a generator for a device that lives outside its tree in C++ only, so
`torch.Generator(device="jax")` raises NotImplementedError. This class takes its place: a
`torch.Generator` that every random operation on the `jax` device accepts.

>>> generator = Generator("jax").manual_seed(0)
>>> first = torch.rand(3, device="jax", generator=generator)
>>> second = torch.rand(3, device="jax", generator=generator)
>>> again = torch.rand(3, device="jax", generator=generator.manual_seed(0))
>>> torch.equal(first, again), torch.equal(first, second)
(True, False)

Its C++ part is a generator of the CPU with the same seed, so the Python parts of torch that draw on
the CPU (`DataLoader`, `random_split`) take it too, and are reproducible with it.

Tested with torch 2.13, which passes an operator's Python code the same object for a C++ generator
as long as a reference to it exists; this class keeps one.
"""

from __future__ import annotations

import secrets
from typing import Any

import torch

from isoshard.torch_bridge._torch_internals import TorchDispatchMode

from ..common import naming
from ..engine.operators import generator_argument
from ..engine.recording import random_state


class Generator(torch.Generator):
    """A stream of random numbers of its own.

    Args:
        device: the `jax` device.

    Raises:
        ValueError: it is another device.

    Example:
        >>> generator = Generator("jax").manual_seed(7)
        >>> sample = torch.rand(3, device="jax", generator=generator)
        >>> generator.initial_seed(), generator.get_offset()
        (7, 1)
    """

    _state: random_state.RandomState

    def __new__(cls, device: str | torch.device = "jax") -> Generator:
        """See the class."""
        naming.check_index(device)
        if torch.device(device).type not in naming.OURS:
            raise ValueError(
                f"isoshard.torch_bridge.Generator is for the jax device, not {str(device)!r}; use "
                "torch.Generator(device) there"
            )
        return super().__new__(cls)

    def __init__(self, device: str | torch.device = "jax"):
        """Start with the seed that torch's generators start with."""
        self._state = random_state.RandomState(seed=super().initial_seed())
        self._passed = _as_passed_to_operators(self)
        generator_argument.introduce(self._passed, self._state)

    @property
    def device(self) -> torch.device:
        """The `jax` device."""
        return naming.current()

    def manual_seed(self, seed: int) -> Generator:
        """Start the stream that belongs to `seed`; returns the generator."""
        super().manual_seed(seed)
        self._state.manual_seed(seed)
        return self

    def seed(self) -> int:
        """Start a stream with a random seed; returns the seed."""
        seed = secrets.randbits(63)
        self.manual_seed(seed)
        return seed

    def initial_seed(self) -> int:
        """The seed of the stream."""
        return self._state.seed

    def get_state(self) -> torch.Tensor:
        """The state of the stream: a uint8 CPU tensor."""
        seed_and_counter = torch.frombuffer(bytearray(self._state.to_bytes()), dtype=torch.uint8)
        return torch.cat([seed_and_counter, super().get_state()])

    def set_state(self, state: torch.Tensor) -> Generator:
        """Go on where `get_state` was called; returns the generator."""
        super().set_state(state[16:].clone())
        self._state.from_bytes(bytes(state[:16].tolist()))
        return self

    def clone_state(self) -> Generator:
        """Another generator with the same state."""
        return type(self)().set_state(self.get_state())

    def graphsafe_get_state(self) -> Generator:
        """As `clone_state`."""
        return self.clone_state()

    def graphsafe_set_state(self, state: Generator) -> Generator:
        """As `set_state`, from a generator."""
        return self.set_state(state.get_state())

    def get_offset(self) -> int:
        """How many keys were taken since the seed."""
        return self._state.counter

    def set_offset(self, offset: int) -> Generator:
        """Take the key at this offset next."""
        state = self._state
        state.from_bytes(state.seed.to_bytes(8, "little") + offset.to_bytes(8, "little"))
        return self

    def __reduce__(self) -> Any:
        """Pickle and copy as a generator with the same state."""
        return _rebuild, (self.get_state(),)


def _rebuild(state: torch.Tensor) -> Generator:
    return Generator().set_state(state)


class _Catch(TorchDispatchMode):
    """Catches the generator that an operator's Python code gets."""

    caught: Any = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.caught = kwargs["generator"]
        return args[0]


_PROBE = torch.empty(0)


def _as_passed_to_operators(generator: torch.Generator) -> torch.Generator:
    """The object that represents `generator` in the arguments of a dispatched operator."""
    with _Catch() as mode:
        _PROBE.normal_(generator=generator)
    return mode.caught
