"""Verify: two models with the same weights give the same results.

>>> import numpy as np
>>> report = verify(lambda x: x @ np.eye(3), lambda x: x + 1e-9, np.ones((2, 3)))
>>> report.largest < 1e-6
True
>>> verify(lambda x: {"logits": x}, lambda x: {"logits": 2 * x}, np.ones((2, 3)))
Traceback (most recent call last):
    ...
isoshard.core.weights.weight_errors.WeightError: the two models do not give the same results (1 error):
  logits: 6 of 6 elements differ by more than rtol=1e-05, atol=1e-05; the largest difference is 1 at (0, 0): 1 and 2
"""  # noqa: E501

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from isoshard.core.frameworks import framework_of
from isoshard.core.layout.leaf_paths import named_leaves
from isoshard.core.transfer.exchange import to_jax

from .weight_errors import raise_listed


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How well two results agree.

    Attributes:
        differences: the largest absolute difference of each result, by name.

    Example:
        >>> Agreement({"logits": 2e-7, "loss": 1e-9}).largest
        2e-07
    """

    differences: dict[str, float]

    @property
    def largest(self) -> float:
        """The largest of all."""
        return max(self.differences.values(), default=0.0)


def verify(
    reference: Callable[..., Any],
    candidate: Callable[..., Any],
    *inputs: Any,
    rtol: float = 1e-5,
    atol: float = 1e-5,
) -> Agreement:
    """Run two models on the same inputs and compare their results.

    Args:
        reference: takes `inputs`; returns an array, a tensor or a tree of those. For a torch module
            see `isoshard.torch_bridge.weights.on_arrays`.
        candidate: likewise.
        *inputs: arrays.
        rtol: relative tolerance, of the reference's values.
        atol: absolute tolerance.

    Returns:
        The differences.

    Raises:
        WeightError: naming every result that differs, in its shape or by more than the tolerance.

    Example:
        >>> verify(lambda x: {"logits": x}, lambda x: {"logits": x + 0.5}, np.ones(3), atol=1)
        Agreement(differences={'logits': 0.5})
    """
    ours, theirs = _results(reference(*inputs)), _results(candidate(*inputs))
    errors = [
        f"{name}: only one of the two models returns it" for name in sorted({*ours} ^ {*theirs})
    ]
    differences = {}
    for name in ours:
        if name in theirs:
            error, differences[name or "result"] = _compare(ours[name], theirs[name], rtol, atol)
            errors += [f"{name or 'the result'}: {error}"] if error else []
    raise_listed("the two models do not give the same results", errors)
    return Agreement(differences)


def _results(tree: Any) -> dict[str, np.ndarray]:
    return {name: _on_host(leaf) for name, leaf in named_leaves(tree)}


def _on_host(leaf: Any) -> np.ndarray:
    if framework_of(leaf) is not None:
        leaf = to_jax(leaf)
    array = np.asarray(jax.device_get(leaf))
    wide = np.complex128 if array.dtype.kind == "c" else np.float64
    return array.astype(wide)


def _compare(ours: np.ndarray, theirs: np.ndarray, rtol: float, atol: float) -> tuple[str, float]:
    if ours.shape != theirs.shape:
        return f"shape {ours.shape}, and {theirs.shape}", float("inf")
    if not ours.size:
        return "", 0.0
    differences = np.abs(ours - theirs)
    same = np.isclose(theirs, ours, rtol=rtol, atol=atol, equal_nan=True)
    differences = np.where(np.isnan(differences), np.where(same, 0, np.inf), differences)
    at = tuple(int(i) for i in np.unravel_index(int(np.argmax(differences)), differences.shape))
    if same.all():
        return "", float(differences[at])
    return (
        f"{(~same).sum()} of {same.size} elements differ by more than rtol={rtol}, atol={atol}; "
        f"the largest difference is {differences[at]:.3g} at {at}: "
        f"{ours[at]:.6g} and {theirs[at]:.6g}"
    ), float(differences[at])
