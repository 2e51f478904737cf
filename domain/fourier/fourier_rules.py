"""Fourier transforms: along axes that are not in blocks each device transforms its own lines.

Along an axis in blocks of unequal sizes the axis is gathered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from jax.lax import FftType

from isoshard.core.kit import JaxprEqn, Value, but, pack_like, rule

from .fourier_primitive import transform

_KINDS = {
    FftType.FFT: "fft",
    FftType.IFFT: "ifft",
    FftType.RFFT: "rfft",
    FftType.IRFFT: "irfft",
}


@rule("fft", always=True)
def of_jax(eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """JAX's own, along the last axes; the inverse ones divide."""
    (value,) = values
    lengths = eqn.params["fft_lengths"]
    kind = _KINDS[eqn.params["fft_type"]]
    rank = len(value.splits)
    axes = range(rank - len(lengths), rank)

    def run(x: Any) -> Any:
        result = transform(kind, x, axes, lengths[-1])
        return result / math.prod(lengths) if kind in ("ifft", "irfft") else result

    return _on_axes(value, axes, run)


@rule("fourier")
def of_ours(eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """That of `iso.domain.fft` and its like."""
    (value,) = values
    kind, axes, length = eqn.params["op"]
    return _on_axes(value, axes, lambda x: transform(kind, x, axes, length))


def _on_axes(value: Value, axes: Sequence[int], run: Callable[[Any], Any]) -> list[Value]:
    """Unpack the transformed axes; repack those whose size is unchanged."""
    splits = [split if axis in axes else None for axis, split in enumerate(value.splits)]
    value = value.unpacked(axes)
    hints = but(value.hints, axes)
    result = Value(run(value.array), value.splits, hints=hints).placed()
    return pack_like([result], splits)
