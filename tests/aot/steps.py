"""Whole training steps for machines that are not here: model families, and parallel styles.

Nothing runs: a step is traced for a described mesh of the target, as the planner traces it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from isoshard import P, Plan

from .artifacts import Artifact, Exported, keep, reason_of
from .outcome import STEP
from .targets import AXES, SHAPE, TARGETS

STYLES = {
    "data": ("llama", Plan({"*": None}, inputs=(("data", "model"),))),
    "fsdp": ("llama", Plan.fsdp("data", min_bytes=4096)),
    "tensor": ("llama", Plan.tensor_parallel("model")),
    "fsdp, tensor": ("llama", Plan.tensor_parallel("model") * Plan.fsdp("data", min_bytes=4096)),
    "sequence": ("llama", Plan.tensor_parallel("model") * Plan.sequence_parallel("model")),
    "expert": ("mixtral", Plan.expert_parallel("model") * Plan.data_parallel("data")),
}
"""How a model is laid out over ("data", "model") -> the family that shows it, and the plan."""

EXCHANGES = ("psum", "all_gather", "psum_scatter", "all_to_all", "ppermute")
"""What devices of one axis say to each other, each by itself."""


def start(folder: Path, platform: str) -> Callable[..., Exported]:
    """Set a process up.

    Args:
        folder: for the programs.
        platform: to export for, "tpu" or "cuda".

    Returns:
        A function of a step's name and its columns, which exports its program.
    """
    import isoshard as iso

    iso.simulate_devices(1)

    def run(name: str, columns: Sequence[str]) -> Exported:
        return Exported((STEP,), (), (exported(folder, platform, name),))

    return run


def names() -> list[str]:
    """Every step: its kind, and which one."""
    from tests.torch_bridge.models.families import FAMILIES

    found = [f"family {name}" for name in FAMILIES]
    found += [f"style {name}" for name in STYLES]
    return found + [f"exchange {name}" for name in EXCHANGES]


def exported(folder: Path, platform: str, entry: str) -> Artifact:
    """Trace a step and write it down for a platform.

    Args:
        folder: for programs.
        platform: "tpu" or "cuda".
        entry: one of `names`.
    """
    from isoshard.planner.programs import exporting

    kind, _, name = entry.partition(" ")
    try:
        made = exporting.exported(traced(kind, name, platform), platform)
    except Exception as error:
        return Artifact(entry, (STEP,), platform, "", reason_of(error))
    file = keep(folder, made.data, platform)
    return Artifact(entry, (STEP,), platform, file, "", made.axes, made.donated, made.wide)


def traced(kind: str, name: str, platform: str) -> Any:
    """A step, traced for the mesh of a platform.

    Args:
        kind: "family", "style" or "exchange".
        name: which.
        platform: "tpu" or "cuda".
    """
    import jax
    import torch

    from isoshard.planner.machine.topologies import topology
    from isoshard.planner.traced.of_step import traced_step

    machine = next(one.machine for one in TARGETS.values() if one.platform == platform)
    mesh = topology(machine).mesh(SHAPE, AXES)
    if kind == "exchange":
        x = jax.ShapeDtypeStruct((16, 64), "float32")
        return traced_step(exchange(name, mesh), (x,), {}, mesh, P())
    family, plan = (name, None) if kind == "family" else STYLES[name]
    step, batch, own = training_step(family)
    if kind == "style":  # as many rows as there are devices
        batch = {key: torch.cat([rows, rows]) for key, rows in batch.items()}
    return traced_step(step, (batch,), {}, mesh, own if plan is None else plan)


def training_step(name: str) -> tuple[Any, dict[str, Any], Plan]:
    """A family's training step, its batch, and its plan over ("data", "model").

    Args:
        name: of the family.
    """
    import torch

    import isoshard.torch_bridge as xs
    from benchmarks.models import hf_step
    from tests.torch_bridge.models.families import FAMILIES, build

    family = FAMILIES[name]
    module = build(name)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    step = hf_step.training_step(module, optimizer)
    return xs.compile(step), family.batch(0), family.plan(module) * Plan.data_parallel("data")


def exchange(name: str, mesh: Any) -> Callable[[Any], Any]:
    """A function over a mesh that does one exchange along "model".

    Args:
        name: one of `EXCHANGES`.
        mesh: with AXES.
    """
    import jax

    ring = [(place, (place + 1) % SHAPE[1]) for place in range(SHAPE[1])]
    talk = {
        "psum": lambda block: jax.lax.psum(block, "model"),
        "all_gather": lambda block: jax.lax.all_gather(block, "model", tiled=True),
        "psum_scatter": functools.partial(
            jax.lax.psum_scatter, axis_name="model", scatter_dimension=1, tiled=True
        ),
        "all_to_all": lambda block: jax.lax.all_to_all(block, "model", 1, 0, tiled=True),
        "ppermute": lambda block: jax.lax.ppermute(block, "model", ring),
    }[name]
    layout = {"in_specs": P("model"), "out_specs": P("model"), "check_vma": False}
    return jax.shard_map(talk, mesh=mesh.abstract_mesh, **layout)
