"""What the devices of a mesh send each other for calls whose rows are independent."""

from __future__ import annotations

import collections
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils import _pytree as pytree

from .own_cases import OWN
from .rows import BLOCKS, Batch, batches


class Sent(NamedTuple):
    """Bytes that each device receives, by the kind of the collective.

    Attributes:
        forward: of the results.
        gradient: of the gradients alone.
    """

    forward: dict[str, int]
    gradient: dict[str, int]


class Outcome(NamedTuple):
    """What was found of an entry.

    Attributes:
        samples: how many of its samples have independent rows.
        sent: of the sample for which most is sent.
        fault: why a sample could not be compiled.
    """

    samples: int
    sent: Sent
    fault: str = ""


def start(limit: int) -> Callable[[str], Outcome]:
    """Set a process up.

    Args:
        limit: samples of each entry.

    Returns:
        A function of an entry's name.
    """
    import isoshard as iso
    import isoshard.torch_bridge

    iso.simulate_devices(BLOCKS)
    torch.empty(0, device="jax")  # from now on the device is there

    from tests.conformance.database import entries
    from tests.host import seed_the_cpu_alone

    torch.set_num_threads(1)
    seed_the_cpu_alone()
    warnings.simplefilter("ignore")
    known = entries() | OWN

    def run(name: str) -> Outcome:
        return outcome(known[name], limit)

    return run


def outcome(info: OpInfo, limit: int) -> Outcome:
    """Compile the samples of an entry whose rows are independent.

    Args:
        info: the entry.
        limit: samples to try.
    """
    try:
        found = batches(info, limit)
    except Exception as error:  # torch's own, of a sample that it cannot make
        return Outcome(0, Sent({}, {}), f"torch: {type(error).__name__}")
    try:
        return Outcome(len(found), sent_for(info, found))
    except Exception as error:
        return Outcome(len(found), Sent({}, {}), f"{type(error).__name__}: {error}"[:200])


def sent_for(info: OpInfo, found: Sequence[Batch]) -> Sent:
    """What is sent for batches that are split over eight devices, with their gradients.

    Args:
        info: an entry of the database.
        found: batches of it.

    Returns:
        The sum. An all-reduce of the gradients of what all rows share is not counted.
    """
    placed = [_on_devices(batch) for batch in found]

    def forward(calls: Any) -> Any:
        return [batch.call(info, tensors) for batch, (tensors, _) in zip(found, calls, strict=True)]

    def gradient(calls: Any) -> Any:
        return [_gradients(info, batch, *call) for batch, call in zip(found, calls, strict=True)]

    def both(calls: Any) -> Any:
        return forward(calls), gradient(calls)

    shared = sum(
        8 * t.numel()  # sums of them may be wide
        for batch in found
        for t, rows in zip(batch.tensors, batch.rows, strict=True)
        if not rows
    )
    sent = _collectives(both, placed)
    if not _more_than_sums(sent, shared):
        return Sent({}, {})
    return Sent(
        _collectives(forward, placed), _more_than_sums(_collectives(gradient, placed), shared)
    )


def _more_than_sums(sent: dict[str, int], shared: int) -> dict[str, int]:
    """What is sent, but for the gradients of what all rows share."""
    allowed = sent.get("all_reduce", 0) <= shared
    return {kind: size for kind, size in sent.items() if kind != "all_reduce" or not allowed}


def _gradients(info: OpInfo, batch: Batch, tensors: Any, slopes: Any) -> list[torch.Tensor]:
    leaves = [t.detach().requires_grad_(own) for t, own in zip(tensors, batch.wants, strict=True)]
    results = batch.call(info, leaves)
    pairs = [pair for pair in zip(results, slopes, strict=True) if pair[0].requires_grad]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not pairs or not wanted:
        return []
    ends, slopes = zip(*pairs, strict=True)
    found = torch.autograd.grad(ends, wanted, slopes, allow_unused=True)
    return [each for each in found if each is not None]


def _on_devices(batch: Batch) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors of a batch, and gradients of its results."""
    import isoshard as iso

    mesh = iso.make_mesh((BLOCKS,), ("batch",))

    def placed(tensor: torch.Tensor, rows: bool) -> torch.Tensor:
        return iso.shard(tensor.detach().to("jax"), mesh, iso.P("batch") if rows else iso.P())

    tensors = [placed(*pair) for pair in zip(batch.tensors, batch.rows, strict=True)]
    return tensors, [placed(torch.ones_like(each), True) for each in batch.results]


def _collectives(function: Callable[..., Any], arguments: Any) -> dict[str, int]:
    import isoshard.torch_bridge as xs
    from isoshard.core.runtime.hlo_collectives import collectives

    step = xs.compile(function)
    if not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(step(arguments))):
        return {}
    sent: collections.Counter[str] = collections.Counter()
    for each in collectives(xs.program_text(step)):
        sent[each.kind] += each.bytes * each.times
    return dict(sorted(sent.items()))
