"""The arguments of a JAX function called from torch: operands of its program, and constants."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from isoshard.core.runtime._jax_internals.undocumented import key_impl
from isoshard.core.runtime.exact_keys import exact
from isoshard.torch_bridge.common.argument_types import Leaf, PyTree
from isoshard.torch_bridge.common.dtypes import physical_dtype
from isoshard.torch_bridge.layout.widths import jax_dtype


@dataclasses.dataclass(frozen=True)
class JaxOperand:
    """An argument that is an input of the program.

    Attributes:
        keys: the kind of the PRNG keys whose bits the input is; None for an ordinary array.
    """

    keys: str | None = None

    def value(self, arrays: Iterator[Any]) -> Any:
        """The argument of the function: the next array."""
        array = next(arrays)
        return array if self.keys is None else jax.random.wrap_key_data(array, impl=self.keys)


TENSOR = JaxOperand()


@dataclasses.dataclass(frozen=True, eq=False)
class Constant:
    """An argument that the function is traced with; 1, 1.0 and True are different ones."""

    constant: Any

    def value(self, arrays: Iterator[Any]) -> Any:
        """The argument of the function: the constant itself."""
        return self.constant

    def __eq__(self, other: object) -> bool:
        """Whether the constants are equal and of equal types, nested ones too."""
        return isinstance(other, Constant) and exact(self.constant) == exact(other.constant)

    def __hash__(self) -> int:
        """Of its key."""
        return hash(exact(self.constant))


def classify(leaf: Leaf) -> tuple[JaxOperand | Constant, Any]:
    """Classify an argument as an array or a constant.

    Returns:
        Its kind, and the array to append to the operands; None for a constant.
    """
    if isinstance(leaf, torch.dtype):
        return Constant(jax_dtype(physical_dtype(leaf))), None
    if not isinstance(leaf, jax.Array | np.ndarray):
        return Constant(leaf), None
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return JaxOperand(str(key_impl(leaf))), jax.random.key_data(leaf)
    return TENSOR, leaf


def of_operands(
    function: Callable[..., Any], structure: PyTree, fixed: Sequence[JaxOperand | Constant]
) -> Callable[..., Any]:
    """A function of its operands alone.

    Args:
        function: takes arguments of any structure.
        structure: of `(args, kwargs)`.
        fixed: the kind of each leaf.
    """

    def flat(*arrays: jax.Array) -> Any:
        rest = iter(arrays)
        args, kwargs = jax.tree.unflatten(structure, [argument.value(rest) for argument in fixed])
        return function(*args, **kwargs)

    return flat


def surroundings() -> tuple[Hashable, ...]:
    """Settings of JAX that tracing depends on (x64 is part of every operand's dtype)."""
    config: Any = jax.config
    return (
        config.jax_default_matmul_precision,
        config.jax_numpy_dtype_promotion,
        jax.sharding.get_abstract_mesh(),
    )
