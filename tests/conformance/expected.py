"""The cells that are known not to pass, each with its reason.

The list is strict: a cell named here that passes fails the run, and so does one that fails and is
not named. A wrong value has no place here.
"""

from __future__ import annotations

from collections.abc import Iterable

_SPARSE = "sparse tensors have no place on the device: JAX arrays are dense"
_COMPLEX32 = "complex32: JAX has no such type"


def _cells(entry: str, columns: Iterable[str], reason: str) -> dict[tuple[str, str], str]:
    return {(entry, column): reason for column in columns}


_FORWARD = ("forward", "bfloat16")
_EVERY_TYPE = (*_FORWARD, "sharded", "int64", "bool")
_MORE = (*("backward", "float64", "complex128", "channels last", "reference", "vmap", "views"),)

EXPECTED: dict[tuple[str, str], str] = {
    **_cells("chalf", (*_EVERY_TYPE, *_MORE), _COMPLEX32),
    **_cells("sparse.mm.reduce", (*_FORWARD, "backward", "float64"), _SPARSE),
    **_cells("sparse.sampled_addmm", ("forward", "backward", "float64", "complex128"), _SPARSE),
    **_cells(
        "to_sparse",
        (*_EVERY_TYPE, "backward", "float64", "complex128", "gradcheck", "views"),
        _SPARSE,
    ),
}
"""(entry, column) -> reason."""
