"""Settings of the device: the precision of matrix products.

>>> before = get_mat_mul_precision()
>>> set_mat_mul_precision("highest")
>>> get_mat_mul_precision()
'highest'
>>> set_mat_mul_precision(before)
"""

from __future__ import annotations

from typing import Any, Literal, cast

import jax

__all__ = ["get_mat_mul_precision", "set_mat_mul_precision"]

Precision = Literal["default", "high", "highest"]

_OWN = {"default": "default", "high": "high", "highest": "highest"}
_OF_JAX = {
    None: "default",
    "default": "default",
    "fastest": "default",
    "bfloat16": "default",
    "high": "high",
    "bfloat16_3x": "high",
    "tensorfloat32": "high",
    "highest": "highest",
    "float32": "highest",
}


def set_mat_mul_precision(precision: Precision) -> None:
    """Choose how exactly float32 matrices are multiplied, and convolved, on TPUs and GPUs.

    It is `jax_default_matmul_precision`, so JAX's own programs follow as well. Programs compiled
    for another precision are kept and are not used.

    Args:
        precision: `"default"` (fastest), `"high"` or `"highest"`.

    Raises:
        ValueError: it is none of them.
    """
    if precision not in _OWN:
        raise ValueError(f"the precision is one of {', '.join(_OWN)}, and it is {precision!r}")
    jax.config.update("jax_default_matmul_precision", precision)


def get_mat_mul_precision() -> Precision:
    """How exactly float32 matrices are multiplied.

    Raises:
        RuntimeError: JAX was set to a precision that has no such name.
    """
    precision: Any = jax.config.jax_default_matmul_precision
    if precision not in _OF_JAX:
        raise RuntimeError(
            f"jax_default_matmul_precision is {precision!r}, which is none of {', '.join(_OWN)}"
        )
    return cast(Precision, _OF_JAX[precision])
