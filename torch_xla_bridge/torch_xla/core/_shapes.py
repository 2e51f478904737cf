"""Shapes of values and names of computations, as XLA's builder has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Shape:
    """The dtype and sizes of a value, by XLA's names; of a tuple, those of each.

    Args:
        shape: `{"type": "f32", "sizes": (2, 3)}`, or a sequence of such.

    >>> Shape.create("f32", (2, 3)).rank
    2
    """

    def __init__(self, shape: Any):
        """See the class."""
        self._shape = shape

    @classmethod
    def create(cls, dtype: str, sizes: Sequence[int], dynamic_dimensions: Any = None) -> Shape:
        """The shape of an array.

        Args:
            dtype: XLA's name.
            sizes: of its axes.
            dynamic_dimensions: must be None: sizes are known here.
        """
        if dynamic_dimensions is not None:
            raise ValueError("dynamic_dimensions: sizes are static in JAX's programs; omit it")
        return cls({"type": str(dtype), "sizes": tuple(sizes)})

    @property
    def shape(self) -> Any:
        """As it was given."""
        return self._shape

    def is_tuple(self) -> bool:
        """Whether it is of several values."""
        return isinstance(self._shape, list | tuple)

    def tuple_size(self) -> int:
        """Of how many."""
        return len(self._shape)

    def tuple_shape(self, index: int) -> Any:
        """Of one of them."""
        return self._shape[index]

    def is_dynamic(self) -> bool:
        """False."""
        return False

    def as_scalar(self) -> Shape:
        """The dtype, without axes."""
        return Shape.create(self.dtype, ())

    @property
    def rank(self) -> int:
        """How many axes."""
        return len(self.sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of its axes."""
        return self._shape["sizes"]

    @property
    def dynamic_dimensions(self) -> None:
        """None."""

    @property
    def dtype(self) -> str:
        """XLA's name of it."""
        return self._shape["type"]


class Builder:
    """The name of a computation that is being built.

    Args:
        name: of the computation.
    """

    def __init__(self, name: str):
        """See the class."""
        self.name = name
