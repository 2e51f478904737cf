"""The cells that are known not to pass, each with its reason.

The list is strict: a cell named here that passes fails the run, and so does one that fails and is
not named. A wrong value has no place here.
"""

from __future__ import annotations

from collections.abc import Iterable

_SPARSE = "sparse tensors have no place on the device: JAX arrays are dense"
_COMPLEX32 = "complex32: JAX has no such type"
_VALUES = (
    "torch's Python code raises if a variance is negative, and reads it; while JAX traces there is "
    "no value"
)
_NUMBERS = (
    "an operator whose kernel is NumPy and returns a number beside tensors: JAX traces arrays"
)


def _cells(entry: str, columns: Iterable[str], reason: str) -> dict[tuple[str, str], str]:
    return {(entry, column): reason for column in columns}


_FORWARD = ("forward", "bfloat16")
_EVERY_TYPE = (*_FORWARD, "sharded", "int64", "bool")
_BY_JAX = ("jax.vjp", "complex jax.vjp")
_MORE = (*("backward", "float64", "complex128", "channels last", "reference", "vmap", "views"),)

EXPECTED: dict[tuple[str, str], str] = {
    **_cells("chalf", (*_EVERY_TYPE, *_MORE, *_BY_JAX), _COMPLEX32),
    **_cells("sparse.mm.reduce", (*_FORWARD, "backward", "float64", "jax.vjp"), _SPARSE),
    **_cells("sparse.sampled_addmm", ("forward", "backward", "float64", "complex128"), _SPARSE),
    **_cells(
        "to_sparse",
        (*_EVERY_TYPE, "backward", "float64", "complex128", "gradcheck", "views", "jax.vjp"),
        _SPARSE,
    ),
    **_cells("nn.functional.gaussian_nll_loss", ("jax.vjp",), _VALUES),
    **_cells("custom.NumpySplitCopyWithIntCustomOp", ("jax.vjp",), _NUMBERS),
}
"""(entry, column) -> reason."""
