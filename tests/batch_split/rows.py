"""Samples of torch's operator database whose rows are independent, with eight times the rows.

A sample is made eight times, with other values each time. Some of its tensors are concatenated
along axis 0, the batch; the others are those of the first. If the results of all rows are the
results of the eight, one after the other, then a device that has one eighth of the rows needs
nothing of the other devices.

>>> from tests.conformance.database import entries
>>> batches(entries()["flipud"], 1)             # along axis 0, where rows are not independent
[]
>>> from tests.batch_split.own_cases import OWN
>>> batches(OWN["conv2d, depthwise"], 1)[0].rows  # the kernel is whole
(True, False)
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

from tests.conformance.samples import choose

BLOCKS = 8
_MOST_TENSORS = 5
_TOLERANCE = 1e-4


class Batch(NamedTuple):
    """A call whose rows are independent.

    Attributes:
        tensors: its tensors, in the order of its arguments.
        rows: for each of them whether axis 0 is the batch.
        wants: for each of them whether it has a gradient.
        leaves: all leaves of its arguments; None in the place of a tensor.
        structure: of the leaves, as `pytree` has it.
        results: what torch makes of it.
    """

    tensors: list[torch.Tensor]
    rows: tuple[bool, ...]
    wants: tuple[bool, ...]
    leaves: list[Any]
    structure: Any
    results: list[torch.Tensor]

    def call(self, info: OpInfo, tensors: Sequence[Any]) -> list[torch.Tensor]:
        """The results of the entry, for other tensors in the places of its own."""
        given = iter(tensors)
        leaves = [next(given) if leaf is None else leaf for leaf in self.leaves]
        arguments, keywords = pytree.tree_unflatten(leaves, self.structure)
        return _tensors(info(*arguments, **keywords))


def batches(info: OpInfo, limit: int) -> list[Batch]:
    """The samples of an entry whose rows are independent.

    Args:
        info: an entry of the database.
        limit: how many to return, of three times as many samples.
    """
    found = (_independent(info, sample) for sample in _samples(info, 3 * limit))
    return [*itertools.islice(filter(None, found), limit)]


def _samples(info: OpInfo, limit: int) -> Iterator[list[SampleInput]]:
    """Each sample in eight versions, which differ in their values."""
    random = copy.copy(info)
    random.sample_inputs = functools.partial(info.sample_inputs, set_seed=False)  # values differ
    versions = []
    for seed in range(BLOCKS):
        torch.manual_seed(seed)
        versions.append(choose(random, torch.float32, limit, requires_grad=info.supports_autograd))
    return map(list, zip(*versions, strict=False))


def _independent(info: OpInfo, versions: Sequence[SampleInput]) -> Batch | None:
    flat = [pytree.tree_flatten(((v.input, *v.args), dict(v.kwargs))) for v in versions]
    structure = flat[0][1]
    if any(other != structure for _, other in flat):
        return None
    tensors = [_tensors(leaves) for leaves, _ in flat]
    first = tensors[0]
    if not first or len(first) > _MOST_TENSORS or any(t.layout != torch.strided for t in first):
        return None
    wants = tuple(t.requires_grad for t in first)
    tensors = [[t.detach() for t in own] for own in tensors]
    if all(torch.equal(mine, other) for mine, other in zip(tensors[0], tensors[1], strict=True)):
        return None  # of constants nothing can be told
    leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in flat[0][0]]
    for rows in _choices(tensors):
        if found := _tried(info, Batch([], rows, wants, leaves, structure, []), tensors):
            return found
    return None


def _choices(tensors: Sequence[Sequence[torch.Tensor]]) -> Iterator[tuple[bool, ...]]:
    """Which tensors may have the batch: the first, and others of as many rows."""
    first = tensors[0]
    if not first[0].dim() or not first[0].shape[0]:
        return
    may = [
        t.dim() > 0
        and t.shape[0] == first[0].shape[0]
        and all(other[at].shape == t.shape for other in tensors)
        for at, t in enumerate(first)
    ]
    if may[0]:
        choices = itertools.product(*((True, False) if one else (False,) for one in may[1:]))
        yield from ((True, *choice) for choice in sorted(choices, key=sum, reverse=True))


def _tried(info: OpInfo, batch: Batch, tensors: Sequence[Sequence[torch.Tensor]]) -> Batch | None:
    """The batch, if its rows are independent."""

    def joined(parts: Sequence[torch.Tensor], whole: bool) -> torch.Tensor:
        return torch.cat(list(parts)) if whole else parts[0]

    every = [joined(parts, own) for *parts, own in zip(*tensors, batch.rows, strict=True)]
    blocks = [
        [
            mine if own else whole
            for mine, whole, own in zip(given, tensors[0], batch.rows, strict=True)
        ]
        for given in tensors
    ]
    try:
        want = [batch.call(info, [t.clone() for t in block]) for block in blocks]
        got = batch.call(info, [t.clone() for t in every])
    except Exception:  # sizes that other arguments name, for instance
        return None
    if not got or any(len(results) != len(got) for results in want):
        return None
    for result, *parts in zip(got, *want, strict=True):
        if not result.dim() or not _equal(result, parts):
            return None
    return batch._replace(tensors=every, results=got)


def _equal(result: torch.Tensor, parts: Sequence[torch.Tensor]) -> bool:
    if any(not part.dim() or part.shape[1:] != result.shape[1:] for part in parts):
        return False
    want = torch.cat(list(parts))
    if want.shape != result.shape or want.dtype != result.dtype:
        return False
    near = {"rtol": _TOLERANCE, "atol": _TOLERANCE, "equal_nan": True}
    return torch.allclose(result, want, **near)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
