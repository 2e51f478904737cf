"""Conversion of operands and results of recorded torch code between JAX and torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from isoshard.core.runtime._jax_internals.primitive_rules import ShapedArray
from isoshard.core.runtime.shard_map_axes import varying, varying_over
from isoshard.torch_bridge.common.argument_types import ArrayLike
from isoshard.torch_bridge.engine.values.value import Aval
from isoshard.torch_bridge.layout.widths import astype, for_jax, jax_dtype


@dataclasses.dataclass(frozen=True)
class Port:
    """An operand or a result.

    Attributes:
        aval: of the tensor.
        type: of the array in JAX.
        flipped: whether the array is the conjugate of the tensor.
        shared: inside `jax.shard_map`, whether a value that is replicated over an axis is the mean
            over its devices, not the same value on each (see `RecordedDerivative`).
        like: of a cotangent, the index of its operand.
    """

    aval: Aval
    type: Any
    flipped: bool = False
    shared: bool = False
    like: int | None = None

    @property
    def has_cotangent(self) -> bool:
        """Whether its dtype has derivatives."""
        return bool(jnp.issubdtype(self.type.dtype, jnp.inexact))

    def to_torch(self, array: ArrayLike) -> Any:
        """The elements of the tensor."""
        array = array if array.dtype == self.aval.physical else astype(array, self.aval.physical)
        return jnp.conj(array) if self.flipped else array

    def to_jax(self, array: ArrayLike, name: str) -> Any:
        """The array in JAX."""
        array = jnp.conj(array) if self.flipped else array
        if self.type.dtype != jax_dtype(array.dtype):
            return astype(array, self.type.dtype)
        return for_jax(array, name=name)

    def cotangent(self, like: int | None = None) -> Port:
        """The port of its cotangents; `like` is the index of this operand."""
        kind = ShapedArray(self.type.shape, self.type.dtype)
        return Port(self.aval, kind, not self.flipped, self.shared, like)

    def zeros(self, operands: Sequence[Any]) -> Any:
        """The cotangent of an operand that no result depends on.

        Args:
            operands: of the program.
        """
        zeros = jnp.zeros(self.type.shape, self.type.dtype)
        return zeros if self.like is None else varying_over(zeros, varying(operands[self.like]))

    def vary_over(self, array: ArrayLike, axes: frozenset[Any]) -> Any:
        """An array as one that varies over axes; a shared one divided among their devices.

        Args:
            array: an input of the program.
            axes: of the `jax.shard_map`, over which the code may vary.
        """
        missing = tuple(sorted(axes - varying(array)))
        if not (self.shared and missing):
            return array
        return varying_over(array, axes) / jax.lax.axis_size(missing)

    def reduce_over(self, array: ArrayLike, axes: frozenset[Any], operands: Sequence[Any]) -> Any:
        """A cotangent of an operand, reduced over axes that the operand is replicated over.

        Args:
            array: of each device.
            axes: of the `jax.shard_map`, over which the code may vary.
            operands: of the program.
        """
        if self.like is None or not axes:
            return array
        array = varying_over(array, axes)
        missing = tuple(sorted(axes - varying(operands[self.like])))
        if not missing:
            return array
        return (jax.lax.pmean if self.shared else jax.lax.psum)(array, missing)
