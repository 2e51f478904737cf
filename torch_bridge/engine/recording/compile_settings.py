"""Settings that are part of a compiled program, and so of the key it is found under.

>>> current()
Settings(matmul=None, excess=False, checked=False)
>>> with jax.default_matmul_precision("highest"), excess_precision():
...     current()
Settings(matmul='highest', excess=True, checked=False)
"""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import torch  # noqa: F401  (for the doctest)

_EXCESS = contextvars.ContextVar(
    "excess precision",
    default=os.environ.get("ISOSHARD_EXCESS_PRECISION", "").lower() in ("1", "true", "yes", "on"),
)


class Settings(NamedTuple):
    """See the module.

    Attributes:
        matmul: the precision of matrix products and convolutions.
        excess: whether the compiler may leave out roundings to bfloat16 and float16.
        checked: whether JAX looks for NaN or infinity in the results: inputs then outlive the
            program, so that the operation can be searched (`nan_search`).
    """

    matmul: Any
    excess: bool
    checked: bool

    @property
    def compiler_options(self) -> dict[str, Any]:
        """The options of XLA."""
        return {"xla_allow_excess_precision": self.excess}


def current() -> Settings:
    """The present settings."""
    config = jax.config
    checked = bool(config.jax_debug_nans or config.jax_debug_infs)
    return Settings(config.jax_default_matmul_precision, _EXCESS.get(), checked)


@contextlib.contextmanager
def excess_precision(allowed: bool = True) -> Iterator[None]:
    """Context in which XLA may leave out roundings to bfloat16 and float16 between operations.

    By default each operation's result is rounded to its dtype, as torch does, so that a program
    gives what its operations give one by one. Without that XLA keeps intermediate results in
    float32 where it fuses; which ones, depends on the program.

    Args:
        allowed: False forbids it again, where `ISOSHARD_EXCESS_PRECISION=1` in the environment
            allows it everywhere.

    Example:
        >>> x = torch.rand(1000, device="jax").bfloat16()
        >>> with excess_precision():
        ...     faster = (x * 3 + x) * x
        ...     _ = faster.cpu()
    """
    token = _EXCESS.set(allowed)
    try:
        yield
    finally:
        _EXCESS.reset(token)
