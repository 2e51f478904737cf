"""Device numbers in few characters, for the boxes of a picture.

>>> device_ranges([3, 0, 1, 2, 9])
'0-3,9'
>>> from isoshard.core.layout.mesh import make_mesh
>>> terms_text(range(8), terms_of(make_mesh((2, 4), ("x", "y")), ("y",)))
'Σ0-3 Σ4-7'
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from isoshard.core.layout.axis_types import AnyMesh

MAX_CHARACTERS = 18
"""Of a text, where that is possible."""

Terms = Sequence[int]
"""By device number which sum its term belongs to."""


def device_ranges(devices: Iterable[int]) -> str:
    """List device numbers: runs as `0-3`, too many as `0,2,…,30`."""
    runs: list[list[int]] = []
    for device in sorted(devices):
        if runs and device == runs[-1][-1] + 1:
            runs[-1].append(device)
        else:
            runs.append([device])
    texts = []
    for run in runs:
        texts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run)
    text = ",".join(texts)
    return text if len(text) <= MAX_CHARACTERS else f"{texts[0]},{texts[1]},…,{texts[-1]}"


def terms_of(mesh: AnyMesh, names: Iterable[str]) -> Terms:
    """By device id, which sum over mesh axes it holds a term of: equal numbers, one sum."""
    shape = [1 if name in names else size for name, size in mesh.shape.items()]
    ids = np.arange(math.prod(shape)).reshape(shape)
    return np.broadcast_to(ids, tuple(mesh.shape.values())).ravel().tolist()


def terms_text(devices: Iterable[int], terms: Terms) -> str:
    """List device numbers, those of each sum behind a `Σ`; too many sums as `Σ0,1 … Σ6,7`."""
    sums: dict[int, list[int]] = {}
    for device in sorted(devices):
        sums.setdefault(terms[device], []).append(device)
    texts = [f"Σ{device_ranges(devices)}" for devices in sums.values()]
    text = " ".join(texts)
    return text if len(text) <= MAX_CHARACTERS else f"{texts[0]} … {texts[-1]}"
