"""JAX settings that are part of a compiled program, and so of the key it is found under.

>>> current()
(None,)
>>> with jax.default_matmul_precision("highest"):
...     current()
('highest',)
"""

from __future__ import annotations

from typing import Any

import jax


def current() -> tuple[Any, ...]:
    """The present settings: the precision of matrix products and convolutions."""
    return (jax.config.jax_default_matmul_precision,)  # pyright: ignore[reportAttributeAccessIssue]
