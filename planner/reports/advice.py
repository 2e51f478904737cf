"""Advice on a report: what would make the step fit or run faster, each with what it saves.

>>> from .findings import InputUse, MemoryEstimate, TimeEstimate
>>> from .report import Report
>>> gib = 1 << 30
>>> memory = MemoryEstimate(2 * gib, 0, 16 * gib, 0, gib, 19 * gib, "", (), 16 * gib)
>>> time = TimeEstimate(0.2, 0.1, 0.2, {}, 0.2, 0.2, 0.5, "compute")
>>> inputs = [InputUse(role, "float32", (), ("data",), size, 9)
...           for role, size in (("parameter", 2 * gib), ("optimizer", 16 * gib))]
>>> report = Report("step", "jax", "trace", "v5e:4x4", {"data": 16}, "", memory, (), 0, 0, time,
...                 inputs=tuple(inputs))
>>> print(advise(report)[0])
split parameters and optimizer state over 'data' (Plan.fsdp('data')): saves 16.9 GiB a device at \
rest, then it fits

Rules read the numbers of a report, and advise nothing without a reason there. They do not guess
what a report lacks (`Report.inputs` may be empty). Bytes are saved at rest: what is gathered
for a moment, or computed again, needs some of them back.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from jax.sharding import NamedSharding

from isoshard.core.kit import StepInput, count_of, human_bytes, human_seconds, percent
from isoshard.planner.machine.links import links

from .findings import InputUse
from .key_figures import mesh_of, shares, traffic

if TYPE_CHECKING:
    from .report import Report


TIGHT = 0.85
"""Share of the capacity above which memory is worth advice although the step fits."""
WORTH = 0.03
"""Share of the capacity, or of the time of a step, that advice has to save."""
STATE_TIMES = 4
"""How often a step moves parameters: forward, backward, the optimizer's reading and writing."""
STATE = ("parameter", "optimizer")
"""The roles that FSDP splits."""
RECOMPUTE = {
    "jax": "jax.checkpoint",
    "flax": "flax.nnx.remat",
    "torch": "isoshard.torch_bridge.recompute.checkpoint_module",
}
"""What computes a layer again in the backward pass, by the framework of the step."""


@dataclasses.dataclass(frozen=True)
class Remedy:
    """One piece of advice.

    Attributes:
        text: what, and what it saves.
        bytes: saved on one device; 0 if it saves time.
        seconds: saved of a step, at most; 0 if it saves memory.
        at_most: the bytes are an upper bound.
    """

    text: str
    bytes: float = 0.0
    seconds: float = 0.0
    at_most: bool = False


def advise(report: Report) -> tuple[str, ...]:
    """Advise what would make a step fit or run faster.

    Args:
        report: any; its own `advice` is not read.

    Returns:
        Sentences. Of a step that does not fit first those that save memory, the most first; then
        those that save time.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from isoshard.planner.estimating import estimate
        >>> from isoshard.planner.machine.topologies import topology
        >>> mesh = topology("v5e:4x4").mesh((4, 4), ("data", "model"))
        >>> w = jax.ShapeDtypeStruct((8192, 8192), "float32")
        >>> advise(estimate(lambda w, x: jnp.tanh(x @ w), (w, w), mesh))[0].partition(":")[0]
        "use axis 'data'"
    """
    memory, time = report.memory, report.time
    sentences: list[str] = []
    if memory.peak > TIGHT * memory.capacity:
        savings = [saving for rule in MEMORY_RULES for saving in rule(report)]
        large = [saving for saving in savings if saving.bytes >= WORTH * memory.capacity]
        for saving in sorted(large, key=lambda saving: -saving.bytes):
            sentences.append(saving.text + _then_fits(report, saving))
    savings = [saving for rule in TIME_RULES for saving in rule(report)]
    quick = [saving for saving in savings if saving.seconds >= WORTH * time.overlapped]
    sentences += [saving.text for saving in sorted(quick, key=lambda saving: -saving.seconds)]
    return tuple(sentences)


def _then_fits(report: Report, remedy: Remedy) -> str:
    memory = report.memory
    if memory.fits:
        return ""
    over = memory.peak - memory.capacity
    if remedy.bytes < over:
        return f"; {human_bytes(over - remedy.bytes)} are still too much then"
    return f", of which {human_bytes(over)} are needed" if remedy.at_most else ", then it fits"


def _split_state(report: Report) -> Iterator[Remedy]:
    """State that is replicated along an axis that divides it."""
    best: tuple[float, str, tuple[str, ...]] = (0.0, "", ())
    for name, size in report.mesh.items():
        uses = [use for use in report.inputs if use.role in STATE and name in use.free]
        saved = sum(use.bytes for use in uses) * (1 - 1 / size)
        if saved > best[0]:
            roles = tuple(role for role in STATE if any(use.role == role for use in uses))
            best = (saved, name, roles)
    saved, name, roles = best
    if saved:
        names = {"parameter": "parameters", "optimizer": "optimizer state"}
        text = " and ".join(names[role] for role in roles)
        how = f" (Plan.fsdp({name!r}))" if "parameter" in roles else ""
        saves = f"saves {human_bytes(saved)} a device at rest"
        yield Remedy(f"split {text} over {name!r}{how}: {saves}", bytes=saved)


def _recompute(report: Report) -> Iterator[Remedy]:
    """Activations that are most of the peak: computed again, or fewer at once."""
    memory = report.memory
    if max((size for _, size in shares(memory)), default=0) != memory.activations:
        return
    text = (
        f"activations are {percent(memory.activations, memory.peak)} of the peak, "
        f"{human_bytes(memory.activations)}"
    )
    if report.framework in RECOMPUTE:
        yield Remedy(
            f"{text}: compute them again in the backward pass ({RECOMPUTE[report.framework]}), "
            f"which saves at most {human_bytes(memory.activations)} a device",
            bytes=memory.activations,
            at_most=True,
        )
    if any(use.role == "input" for use in report.inputs):
        half = memory.activations / 2
        yield Remedy(
            f"{text}: halve the batch and accumulate gradients over two, which saves at most "
            f"{human_bytes(half)} a device",
            bytes=half,
            at_most=True,
        )


def _fewer_bits(report: Report) -> Iterator[Remedy]:
    """Parameters, and state of the optimizer, in four bytes an element."""
    for role, text in (("parameter", "parameters"), ("optimizer", "optimizer state")):
        wide = sum(use.bytes for use in report.inputs if (use.role, use.dtype) == (role, "float32"))
        if wide:
            yield Remedy(
                f"keep {text} in bfloat16 instead of float32: saves {human_bytes(wide / 2)} a "
                "device",
                bytes=wide / 2,
            )


def _more_devices(report: Report) -> Iterator[Remedy]:
    """Twice the devices along the axis that splits most."""
    if report.memory.fits or not report.inputs:
        return
    best: tuple[float, str] = (0.0, "")
    for name in report.mesh:
        split = sum(use.bytes for use in report.inputs if name in use.axes)
        if _splits(report.inputs, "input", name):
            split += report.memory.activations
        best = max(best, (split / 2, name))
    saved, name = best
    if saved:
        size, devices = report.mesh[name], math.prod(report.mesh.values())
        yield Remedy(
            f"take twice the devices ({2 * devices:,}, {name}={2 * size}): with the same batch "
            f"what {name!r} splits halves, which saves {human_bytes(saved)} a device",
            bytes=saved,
        )


def _idle_axis(report: Report) -> Iterator[Remedy]:
    """An axis that splits nothing: its devices all do the same."""
    if not report.inputs:
        return
    talking = {name for use in report.collectives for name in use.axes}
    for name, size in report.mesh.items():
        if size > 1 and name not in talking and not any(name in use.axes for use in report.inputs):
            saved = report.time.busy * (1 - 1 / size)
            yield Remedy(
                f"use axis {name!r}: batch and model are whole along it, so its "
                f"{count_of(size, 'device')} do the same work; splitting the batch over it saves "
                f"{human_seconds(saved)} of {human_seconds(report.time.busy)} of computing",
                seconds=saved,
            )


def _collectives_exceed_compute(report: Report) -> Iterator[Remedy]:
    """Collectives along axes that take longer than computing."""
    time = report.time
    for use in traffic(report):
        extra, names = use.seconds - time.busy, use.axes.split("+")
        if extra <= 0 or not all(name in report.mesh for name in names):
            continue
        kind = f"{use.kinds[0]}s" if len(use.kinds) == 1 else "collectives"
        several = f" ({', '.join(use.kinds)})" if len(use.kinds) > 1 else ""
        text = (
            f"{kind} over {use.axes!r}{several} take {human_seconds(use.seconds)}, computing "
            f"{human_seconds(time.busy)}"
        )
        if time.busy and any(_splits(report.inputs, "input", name) for name in names):
            remedy = (
                f"a batch {use.seconds / time.busy:.1f} times as large per device would hide what "
                "does not grow with it, or fewer shards"
            )
        else:
            remedy = f"fewer shards than {math.prod(report.mesh[name] for name in names)} along it"
        yield Remedy(f"{text}: {remedy}; {human_seconds(extra)} are waited for", seconds=extra)


def _leaves_fast_links(report: Report) -> Iterator[Remedy]:
    """An axis with much traffic that runs over the network although it would fit inside."""
    mesh = mesh_of(report)
    if mesh is None:
        return
    links_of_axis = links(mesh)
    seconds = {use.axes: use.seconds for use in traffic(report)}
    for name, link in links_of_axis.items():
        if link.kind not in ("network", "dcn"):
            continue
        inner = _fast_size(report)
        chip = mesh.devices.flat[0].topology.chip
        fast = chip.link * (2 if chip.links else 1)
        spent = seconds.get(name, 0.0)
        lighter = [
            other for other in links_of_axis if other != name and seconds.get(other, 0.0) < spent
        ]
        if link.size > inner or inner % link.size or not lighter:
            continue
        saved = spent * (1 - link.bandwidth / fast)
        where = "slices" if chip.links else "hosts"
        yield Remedy(
            f"axis {name!r} crosses {where}: {link.bandwidth / 1e9:.3g} GB/s a device against "
            f"{fast / 1e9:.3g} GB/s inside; put it last in the mesh, so that {lighter[0]!r} "
            f"crosses them instead: saves at most {human_seconds(saved)}",
            seconds=saved,
        )


def _fast_size(report: Report) -> int:
    """How many devices fast links join."""
    mesh = mesh_of(report)
    if mesh is None:
        return 0
    machine = mesh.devices.flat[0].topology
    if machine.chip.links:
        return math.prod(machine.shape)
    return machine.chip.domain or machine.per_host


def _moves_more_than_computes(report: Report) -> Iterator[Remedy]:
    """A step that waits for memory: for its own state, or at some line."""
    time, memory = report.time, report.memory
    extra = time.busy - time.compute
    if time.limit != "memory" or extra <= 0:
        return
    text = (
        f"moving {human_bytes(report.bytes_moved)} takes {human_seconds(time.memory)}, computing "
        f"{human_seconds(time.compute)}, and {human_seconds(extra)} are waited for"
    )
    state = min(STATE_TIMES * memory.parameters + 2 * memory.optimizer, report.bytes_moved)
    if state >= report.bytes_moved / 2:
        share = percent(state, report.bytes_moved)
        yield Remedy(
            f"{text}: {share} of it are parameters and optimizer state, which a larger batch per "
            "device reads for more rows",
            seconds=extra,
        )
        return
    at: dict[str, float] = {}
    for event in report.timeline:
        if event.what == "compute" and event.line:
            at[event.line] = at.get(event.line, 0.0) + event.seconds
    if at:
        most = max(at, key=lambda line: at[line])
        yield Remedy(
            f"{text}: most of the time goes into {most}, {human_seconds(at[most])} of "
            f"{human_seconds(time.busy)}; fuse it, or let it work on fewer bytes (bfloat16)",
            seconds=extra,
        )


def _splits(inputs: Sequence[InputUse], role: str, axis: str) -> bool:
    return any(use.role == role and axis in use.axes for use in inputs)


MEMORY_RULES: tuple[Callable[[Report], Iterator[Remedy]], ...] = (
    _split_state,
    _recompute,
    _fewer_bits,
    _more_devices,
)
TIME_RULES: tuple[Callable[[Report], Iterator[Remedy]], ...] = (
    _idle_axis,
    _collectives_exceed_compute,
    _leaves_fast_links,
    _moves_more_than_computes,
)


Group = tuple[str, str, tuple[str, ...], tuple[str, ...]]


def input_uses(inputs: Sequence[StepInput]) -> tuple[InputUse, ...]:
    """Sum up the inputs of a step.

    Example:
        >>> import numpy as np
        >>> from jax.sharding import PartitionSpec as P
        >>> from isoshard.planner.machine.topologies import topology
        >>> mesh = topology("v5e:4x4").mesh((4, 4), ("data", "model"))
        >>> layout = NamedSharding(mesh, P(None, "model"))
        >>> up = StepInput("up", "parameter", (512, 512), np.dtype("float32"), layout)
        >>> input_uses([up, up])
        (InputUse(role='parameter', dtype='float32', axes=('model',), free=('data',), \
bytes=524288, count=2),)
    """
    groups: dict[Group, list[int]] = {}
    for leaf in inputs:
        axes = _splitting(leaf.sharding)
        group = (leaf.role, leaf.dtype.name, axes, _free(leaf, axes))
        groups.setdefault(group, []).append(leaf.bytes_per_device)
    uses = [InputUse(*group, sum(sizes), len(sizes)) for group, sizes in groups.items()]
    return tuple(sorted(uses, key=lambda use: -use.bytes))


def _splitting(layout: NamedSharding) -> tuple[str, ...]:
    named: set[str] = set()
    for entry in layout.spec:
        if isinstance(entry, str):
            named.add(entry)
        elif isinstance(entry, tuple):
            named.update(entry)
    return tuple(name for name, size in layout.mesh.shape.items() if name in named and size > 1)


def _free(leaf: StepInput, axes: tuple[str, ...]) -> tuple[str, ...]:
    shard = leaf.sharding.shard_shape(leaf.shape)
    return tuple(
        name
        for name, size in leaf.sharding.mesh.shape.items()
        if size > 1 and name not in axes and any(n and n % size == 0 for n in shard)
    )
