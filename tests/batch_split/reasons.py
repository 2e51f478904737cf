"""Why entries send something for a split batch: `fnmatch` pattern of names -> reason."""

from __future__ import annotations

_LOOP = "a few bytes: a loop ends when that of each row has"
_SERIES = "a few bytes: a series has as many terms as the largest of all rows needs"
_ERF = "a result that is only XLA's erf is replicated; within a formula it is split"
_AS_STRIDED = (
    "XLA gathers and scatters by the indices of elements in the memory of a view, all of it"
)
_QR = "the gradient of `linalg.qr` writes diagonals by a scatter into the whole memory"

REASONS: dict[str, str] = {
    "digamma": _SERIES,
    "erf": _ERF,
    "index_add": "an index array names rows; that they are each device's own is not known",
    "linalg.ldl_factor*": _LOOP,
    "linalg.qr": _QR,
    "masked_scatter": "elements are taken in the order of all rows, of which one has some",
    "nn.functional.linear_cross_entropy.chunked_none": "chunks are of all rows together",
    "pca_lowrank": _QR,
    "*polygamma*": _SERIES,
    "qr": _QR,
    "special.ndtr": _ERF,
    "stft": _AS_STRIDED,
    "svd_lowrank": _QR,
    "unfold*": _AS_STRIDED,
}
