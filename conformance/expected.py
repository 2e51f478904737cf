"""The cells that are known not to pass, each with its reason.

The list is strict: a cell named here that passes fails the run, and so does one that fails and is
not named. A wrong value has no place here.
"""

from __future__ import annotations

from collections.abc import Iterable

_SPARSE = "sparse tensors have no place on the device: JAX arrays are dense"
_COMPLEX32 = "complex32: JAX has no such type"
_HASH = "the result is a 64-bit hash, which the device's 32-bit integers cannot hold"

_EMPTY = "for an empty batch torch makes statistics in float64, which needs jax_enable_x64"
_BOUNDS = "torch fills in the bounds of int64, which the device's 32-bit integers cannot hold"


def _cells(entry: str, columns: Iterable[str], reason: str) -> dict[tuple[str, str], str]:
    return {(entry, column): reason for column in columns}


_FORWARD = ("forward", "bfloat16")
_EVERY_TYPE = (*_FORWARD, "sharded", "int64", "bool")

EXPECTED: dict[tuple[str, str], str] = {
    **_cells("nn.functional.batch_norm", ("forward", "backward"), _EMPTY),
    **_cells("chalf", (*_EVERY_TYPE, "backward"), _COMPLEX32),
    **_cells("hash_tensor", (*_EVERY_TYPE, "out="), _HASH),
    **_cells("masked.amax", ("int64",), _BOUNDS),
    **_cells("masked.amin", ("int64",), _BOUNDS),
    **_cells("masked.argmax", ("int64",), _BOUNDS),
    **_cells("masked.argmin", ("int64",), _BOUNDS),
    **_cells("masked.logsumexp", ("int64",), _BOUNDS),
    **_cells("sparse.mm.reduce", (*_FORWARD, "backward"), _SPARSE),
    **_cells("sparse.sampled_addmm", ("forward", "backward"), _SPARSE),
    **_cells("to_sparse", (*_EVERY_TYPE, "backward"), _SPARSE),
}
"""(entry, column) -> reason."""
