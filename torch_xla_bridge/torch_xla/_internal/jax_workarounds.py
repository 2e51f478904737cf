"""What torch_xla does before it may call JAX, by its names: nothing, here JAX is there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["jax_env_context", "jax_import_guard", "maybe_get_jax", "requires_jax"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def jax_import_guard() -> None:
    """Nothing: JAX holds the devices anyway."""


def requires_jax(func: _Function) -> _Function:
    """The function, as it is.

    Args:
        func: calls JAX.
    """
    return func


def jax_env_context() -> contextlib.AbstractContextManager[None]:
    """A context that does nothing."""
    return contextlib.nullcontext()


def maybe_get_jax() -> Any:
    """JAX."""
    import jax

    return jax
