"""Programs of `programs.py` that are wrong, or refused without need, each with the reason.

They are strict: one that is mended fails its test until its line here goes.
"""

from __future__ import annotations

import jax
import pytest
import torch

import isoshard.torch_bridge as xs

from .programs import Program

CAPTURED = ("compile", "compile with repeat")
NEEDS_ITS_VALUE = ("copied to_jax and back", "full", "jax_function", "numbers", "to_jax and back")

VALUE = "an array that leaves a captured step is refused"


def reason(program: Program, way: str) -> tuple[str, type[BaseException]] | None:
    """Why a program fails, and with what; None if it is right.

    Args:
        program: with a state, or with a verb.
        way: to run it.
    """
    first, second, *rest = program.traits
    if way not in CAPTURED:
        return None
    if rest:
        return None
    if first in NEEDS_ITS_VALUE and (first, second) != ("full", "held"):
        return VALUE, xs.CaptureError
    return None


def marked(program: Program, way: str) -> tuple[pytest.MarkDecorator, ...]:
    """The mark of a program that fails; none for others."""
    known = reason(program, way)
    return (pytest.mark.xfail(reason=known[0], raises=known[1]),) if known else ()


DERIVATIVES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {}
"""By reason: ways of `test_derivatives.py`, and forms."""

INTEGERS_OF_64 = (torch.int64, torch.uint64)
FLOATS_OF_8 = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)

CROSSINGS = {
    "JAX's own: jnp.from_dlpack cuts to 32 bits what torch gives it, from the CPU too": (
        AssertionError,
        ("dlpack",),
        (*INTEGERS_OF_64, torch.float64, torch.complex128),
    ),
    "torch pickles these dtypes by a storage that the device lacks": (
        AttributeError,
        ("pickle",),
        (*UNSIGNED, *FLOATS_OF_8),
    ),
    "a program that moves the smallest float8_e5m2fnuz doubles it": (
        AssertionError,
        ("shard on the device",),
        (torch.float8_e5m2fnuz,) if jax.__version_info__ < (0, 11) else (),
    ),
}
"""By reason: the error, ways over and dtypes of `test_crossings.py`."""
