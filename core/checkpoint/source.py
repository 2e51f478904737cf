"""A checkpoint that can be read, and the state of a module, for all formats and frameworks.

A checkpoint is a `Source`: entries by name, and elements of them by the block. A module or
optimizer is a dictionary of `NamedState`s by name. `iso.save` and `iso.restore` know only these.

>>> Entry((4, 2), "int64", stored="int32").nbytes
32
>>> Entry.of_value(0.1).value
0.1

Dtypes are names. An entry has its logical dtype (`torch.int64`), and the one its
elements are stored in, which may be narrower: `int32` while `jax_enable_x64` is off.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding

from isoshard.core.blocks.block_layout import BlockLayout


class Memory(enum.Enum):
    """The memory of an array without a sharding."""

    HOST = "host"
    DEFAULT_DEVICE = "default device"


Destination = jax.sharding.Sharding | BlockLayout | Memory
"""Sharding or memory of an array; in blocks of unequal sizes it is an `UnevenArray`."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A leaf of a checkpoint.

    Attributes:
        shape: global; of random keys without the axis of their words.
        dtype: name of the logical dtype, such as "int64" or "key<fry>"; "" for a value.
        stored: name of the dtype of the elements.
        spec: per axis the names of the mesh axes that it was sharded over, if it was on a mesh.
        value: a number, string or the like, if it is no array.
        is_value: whether it is a value, and no array.
        impl: of random keys, for `jax.random.wrap_key_data`; "" for other arrays.
    """

    shape: tuple[int, ...]
    dtype: str
    stored: str = ""
    spec: tuple[tuple[str, ...], ...] | None = None
    value: Any = None
    is_value: bool = False
    impl: str = ""

    @classmethod
    def of_value(cls, value: Any) -> Entry:
        """An entry that is a number, a string, .."""
        return cls((), "", value=value, is_value=True)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements as they are stored."""
        return math.prod(self.shape) * jax.numpy.dtype(self.stored or self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of an entry that is read.

    Attributes:
        name: of the entry.
        index: per axis a slice with start and stop.
        out: memory for it, of the entry's stored dtype.
    """

    name: str
    index: tuple[slice, ...]
    out: np.ndarray


class Source(Protocol):
    """A checkpoint that can be read."""

    where: str
    entries: Mapping[str, Entry]

    def read(self, blocks: Sequence[Block]) -> None:
        """Fill the memory of all blocks.

        Raises:
            CheckpointError: something was altered or is missing; it is named.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Within:
    """The array of a framework that a state is a component of, as quantized numbers and scales are.

    Attributes:
        name: of that array, as a plan matches it; "" for a leaf of the tree.
        fit: from the sharding of that array to the component's.
    """

    name: str
    fit: Callable[[NamedSharding], NamedSharding]


@dataclasses.dataclass(frozen=True)
class NamedState:
    """The state of a module or optimizer under one name.

    Attributes:
        value: an array of any framework, a `jax.ShapeDtypeStruct` of a future one, or
            a number, string, None, or tuples and lists of those.
        follows: the array whose sharding this one has, if the two have one shape: of an
            optimizer's state the parameter.
        within: the array that this one is a component of, or None.
    """

    value: Any
    follows: Any = None
    within: Within | None = None


@dataclasses.dataclass(frozen=True)
class TargetArray:
    """The array that a restore creates.

    Attributes:
        shape: global.
        dtype: name of the logical dtype.
        destination: its sharding or memory.
        wide: it has 64 bits, also where JAX's x64 is off.
    """

    shape: tuple[int, ...]
    dtype: str
    destination: Destination
    wide: bool = False
