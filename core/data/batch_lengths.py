"""Padding of sequences to a few lengths, so that few programs serve all batches.

>>> from isoshard.core.transfer.leaf_specs import named_arrays
>>> leaves, _ = named_arrays({"input_ids": np.ones((2, 5), int), "score": np.ones(2)}, None)
>>> pad_lengths(leaves, (4, 8), FILL, "batch")
>>> [leaf.value.shape for leaf in leaves], leaves[0].value[0].tolist()
([(2, 8), (2,)], [1, 1, 1, 1, 1, 0, 0, 0])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from isoshard.core.errors import ShardingError
from isoshard.core.runtime import metrics
from isoshard.core.transfer.leaf_specs import NamedArray

FILL: Mapping[str, Any] = {
    "input_ids": 0,
    "attention_mask": 0,
    "token_type_ids": 0,
    "position_ids": 0,
    "labels": -100,
}
"""The arrays of token sequences in transformers, and what they are padded with."""


def pad_lengths(
    leaves: list[NamedArray], lengths: Sequence[int], fill: Mapping[str, Any], name: str
) -> None:
    """Pad axis 1 at its end to the smallest length that is enough.

    Args:
        leaves: of the batch, NumPy arrays; changed in place.
        lengths: ascending.
        fill: the value by the name of each array that is padded.
        name: of the batch, for messages.

    Raises:
        ShardingError: a sequence is longer than all lengths, no array is named in `fill`, or one
            is on devices or has one axis.
    """
    sequences = [leaf for leaf in leaves if leaf.path in fill]
    if not sequences:
        listed = ", ".join(repr(leaf.path) for leaf in leaves)
        raise ShardingError(
            f"{name}: lengths= pads {', '.join(fill)}, and the batch has {listed or 'no arrays'}; "
            "name its arrays and their padding by fill="
        )
    for leaf in sequences:
        if not isinstance(leaf.value, np.ndarray) or leaf.value.ndim < 2:
            raise ShardingError(
                f"{leaf.name}: a {type(leaf.value).__name__} of {np.ndim(leaf.value)} axes is no "
                "batch of sequences in host memory, and cannot be padded along axis 1"
            )
    longest = max(leaf.value.shape[1] for leaf in sequences)
    target = next((length for length in lengths if length >= longest), None)
    if target is None:
        raise ShardingError(
            f"{name}: a sequence of {longest} is longer than the last of lengths={tuple(lengths)}; "
            "add a length, or cut the sequences"
        )
    for leaf in sequences:
        missing = target - leaf.value.shape[1]
        if missing:
            widths = [(0, missing if axis == 1 else 0) for axis in range(leaf.value.ndim)]
            leaf.value = np.pad(leaf.value, widths, constant_values=fill[leaf.path])
            metrics.count("data.padded_positions", missing * leaf.value.shape[0])
