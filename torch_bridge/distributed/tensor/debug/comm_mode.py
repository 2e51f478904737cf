"""`CommDebugMode`: the collectives of the compiled programs that run inside a `with` block.

>>> import torch, isoshard.torch_bridge as xs
>>> mesh = xs.Mesh(range(8), (2, 4), ("dp", "tp"))
>>> x = xs.mark_sharding(torch.ones(8, 16, device="jax"), mesh, ("dp", "tp"))
>>> w = xs.mark_sharding(torch.ones(16, 4, device="jax"), mesh, ("tp", None))
>>> comm_mode = CommDebugMode()
>>> with comm_mode:
...     y = x @ w
>>> comm_mode.get_comm_counts(), comm_mode.get_total_counts()
({'all_reduce': 1}, 1)
>>> comm_mode.get_axis_counts()
{('all_reduce', ('tp',)): 1}
>>> comm_mode.get_comm_bytes()               # of the result, on one device: f32[4, 4]
{'all_reduce': 64}

torch counts the collectives of each operation. Here a step is one program, and its collectives are
read from the optimized HLO and counted each time it runs; a collective in a loop counts once for
each iteration. XLA combines collectives of several arrays to one, which counts once. Its CPU
backend writes the sum of a product that is required in shards as an all-reduce and a slice, where
the other backends reduce-scatter.

Entering and leaving executes recorded operations, so that the count is of the block. An
unreferenced result is not computed, and not counted.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import torch
from jax.sharding import Mesh, NamedSharding

from isoshard.core.layout.mesh import mesh_of
from isoshard.core.runtime import metrics
from isoshard.core.runtime.formatting import human_bytes
from isoshard.core.runtime.hlo_collectives import Collective, axes_of, collectives
from isoshard.torch_bridge.common.argument_types import MeshLike
from isoshard.torch_bridge.distributed.device_mesh import device_mesh_of
from isoshard.torch_bridge.engine.compiling import plan_lowering, program
from isoshard.torch_bridge.engine.values import sharding_ids

from .module_names import Modules

_TORCH_NAMES = {
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "all_reduce_coalesced": "all_reduce",
    "all_to_all_single": "all_to_all",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
}


class CommCounts(dict[str, int]):
    """Counts by kind; a kind that did not occur counts 0, and torch's operators are kinds too.

    >>> counts = CommCounts(all_gather=2)
    >>> counts["all_reduce"], counts[torch.ops.c10d_functional.all_gather_into_tensor]
    (0, 2)
    """

    def __missing__(self, kind: Any) -> int:
        """The count of an operator of torch, or none."""
        name: str = getattr(kind, "__name__", kind)
        name = _TORCH_NAMES.get(name, name)
        return self.get(name, 0)


@dataclasses.dataclass(frozen=True)
class CountedRun:
    """One execution of a program.

    Attributes:
        where: the line of user code that needed it, as `file.py:123`.
        collectives: its collectives.
        axes: for each of them the mesh axes along which it talks, None where it goes across them.
    """

    where: str
    collectives: tuple[Collective, ...]
    axes: tuple[tuple[str, ...] | None, ...]


class CommDebugMode:
    """Count the collectives of the programs that run inside; see the module's description.

    Entered again it counts from zero.

    Args:
        device_mesh: the mesh whose axes `get_axis_counts` names; those of the programs' tensors if
            not given.

    Attributes:
        runs: the executions, in order.

    Example:
        >>> import isoshard.torch_bridge as xs
        >>> x = xs.mark_sharding(torch.ones(8, device="jax"), xs.get_1d_mesh("x"), ("x",))
        >>> with CommDebugMode() as comm_mode:
        ...     total = x.sum()
        >>> comm_mode.get_comm_counts()
        {'all_reduce': 1}
    """

    def __init__(self, device_mesh: MeshLike = None):
        """See the class."""
        self.runs: list[CountedRun] = []
        self._mesh = device_mesh and device_mesh_of(device_mesh).get_jax_mesh()
        self._modules = Modules()
        self._moved = 0

    def __enter__(self) -> Self:
        """Execute what is recorded, and count from here."""
        program.sync()
        self.runs.clear()
        self._moved = -_moves()
        self._modules.start()
        program.WATCHING.append(self._watch)
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        """Execute what is recorded, unless an error comes through, and stop."""
        try:
            if kind is None:
                program.sync()
        finally:
            program.WATCHING.remove(self._watch)
            self._modules.stop()
            self._moved += _moves()

    def get_comm_counts(self) -> CommCounts:
        """How often each kind of collective ran: all_reduce, all_gather, reduce_scatter, ..."""
        return self._sums(lambda collective: collective.times)

    @property
    def comm_counts(self) -> CommCounts:
        """As `get_comm_counts`."""
        return self.get_comm_counts()

    @property
    def comm_module_counts(self) -> dict[str, dict[str, CommCounts]]:
        """All counts in torch's form: those of "Global", under "forward".

        A program computes many modules, forward and backward together, so no module has counts of
        its own, and "backward" has none.
        """
        return {"Global": {"forward": self.get_comm_counts(), "backward": CommCounts()}}

    def get_comm_bytes(self) -> CommCounts:
        """Bytes of the results of each kind of collective, on one device."""
        return self._sums(lambda collective: collective.times * collective.bytes)

    def get_total_counts(self) -> int:
        """How many collectives ran."""
        return sum(self.get_comm_counts().values())

    def get_axis_counts(self) -> dict[tuple[str, tuple[str, ...] | None], int]:
        """How often each kind ran along which axes of the mesh; None where it goes across them."""
        counts: collections.Counter[Any] = collections.Counter()
        for run in self.runs:
            for collective, axes in zip(run.collectives, run.axes, strict=True):
                counts[collective.kind, axes] += collective.times
        return dict(counts)

    def get_parameter_info(self) -> dict[str, dict[str, torch.Tensor]]:
        """The parameters of each module that ran forward inside, by the module's name."""
        return self._modules.parameters()

    def get_sharding_info(self) -> dict[str, tuple[Any, ...]]:
        """The placements of these parameters by name, of those that are sharded."""
        return self._modules.placements()

    def generate_comm_debug_tracing_table(self, noise_level: int = 3) -> str:
        """The counts, the programs and the modules as text.

        Args:
            noise_level: 0 for the counts of each program; from 1 on also the modules that ran with
                their parameters' placements; from 2 on also every collective.
        """
        lines = ["Global", *_summary(self.get_comm_counts(), self.get_comm_bytes(), "  ")]
        if self._moved:
            lines.append(f"  *moved between devices outside programs: {self._moved}")
        for index, run in enumerate(self.runs):
            lines.append(f"  program {index}, run at {run.where}")
            lines += _of_run(run, every=noise_level > 1)
        if noise_level > 0:
            lines += self._modules.lines()
        return "\n".join(lines) + "\n"

    def log_comm_debug_tracing_table_to_file(
        self, file_name: str = "comm_mode_log.txt", noise_level: int = 3
    ) -> None:
        """Write the table to a file.

        Args:
            file_name: the file, replaced if it is there.
            noise_level: as for `generate_comm_debug_tracing_table`.
        """
        table = self.generate_comm_debug_tracing_table(noise_level)
        Path(file_name).write_text(table, encoding="utf-8")

    def generate_json_dump(
        self, file_name: str = "comm_mode_log.json", noise_level: int = 3
    ) -> None:
        """Write the same as JSON: `counts`, `bytes`, `programs` and `parameters`.

        Args:
            file_name: the file, replaced if it is there.
            noise_level: as for `generate_comm_debug_tracing_table`.
        """
        runs: list[dict[str, Any]] = [{"where": run.where} for run in self.runs]
        for entry, run in zip(runs, self.runs, strict=True):
            pairs = zip(run.collectives, run.axes, strict=True)
            entry["collectives"] = [
                {
                    "kind": collective.kind,
                    "bytes": collective.bytes,
                    "times": collective.times,
                    "axes": axes,
                }
                for collective, axes in (pairs if noise_level > 1 else ())
            ]
        dump: dict[str, Any] = {
            "counts": self.get_comm_counts(),
            "bytes": self.get_comm_bytes(),
            "programs": runs,
        }
        if noise_level > 0:
            dump["parameters"] = {k: str(v) for k, v in self.get_sharding_info().items()}
        Path(file_name).write_text(json.dumps(dump, indent=4), encoding="utf-8")

    def __repr__(self) -> str:
        """The number of collectives."""
        return f"CommDebugMode(get_total_counts()={self.get_total_counts()})"

    def _watch(self, executed: program.Program, plan: program.CompileRequest) -> None:
        counted = _COLLECTIVES.get(executed)
        if counted is None:
            counted = _COLLECTIVES[executed] = collectives(executed.text())
        meshes = [self._mesh] if self._mesh is not None else _meshes(plan)
        axes = tuple(_axes(collective, meshes) for collective in counted)
        self.runs.append(CountedRun(metrics.user_location(), counted, axes))

    def _sums(self, amount: Any) -> CommCounts:
        counts = CommCounts()
        for run in self.runs:
            for collective in run.collectives:
                counts[collective.kind] = counts[collective.kind] + amount(collective)
        return counts


_COLLECTIVES: weakref.WeakKeyDictionary[program.Program, tuple[Collective, ...]] = (
    weakref.WeakKeyDictionary()
)


def _moves() -> int:
    return metrics.counters().get("transfers.between_devices", 0)


def _meshes(plan: program.CompileRequest) -> list[Mesh]:
    """The meshes of a program's tensors; those that a user named first."""
    named = [sharding_ids.sharding(layout_id) for layout_id in plan_lowering.layouts_in(plan)]
    meshes = {mesh_of(sharding): None for sharding in named if isinstance(sharding, NamedSharding)}
    most = max((mesh.size for mesh in meshes), default=0)
    return sorted((mesh for mesh in meshes if mesh.size == most), key=lambda mesh: len(mesh.shape))


def _axes(collective: Collective, meshes: Iterable[Mesh]) -> tuple[str, ...] | None:
    for mesh in meshes:
        if (axes := axes_of(collective, mesh)) is not None:
            return axes
    return None


def _summary(counts: CommCounts, sizes: CommCounts, indent: str) -> list[str]:
    return [
        f"{indent}*{kind}: {counts[kind]}  {human_bytes(sizes[kind])}" for kind in sorted(counts)
    ] or [f"{indent}no collectives"]


def _of_run(run: CountedRun, *, every: bool) -> list[str]:
    counts, sizes = CommCounts(), CommCounts()
    for collective in run.collectives:
        counts[collective.kind] = counts[collective.kind] + collective.times
        sizes[collective.kind] = sizes[collective.kind] + collective.times * collective.bytes
    lines = _summary(counts, sizes, "    ")
    if every:
        for collective, axes in zip(run.collectives, run.axes, strict=True):
            along = "across the mesh" if axes is None else f"along {', '.join(axes)}"
            often = f", {collective.times} times" if collective.times > 1 else ""
            lines.append(
                f"      **{collective.kind} {along}: {human_bytes(collective.bytes)}{often}"
            )
    return lines
