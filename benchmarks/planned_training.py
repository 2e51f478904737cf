"""What `benchmarks.planned_steps` trains: two models under plans, on virtual devices.

`measured` is called in a process of its own, by `tools.harness.calls`.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
import torch
from jax.sharding import Mesh

import isoshard as iso
import isoshard.torch_bridge as xs
from benchmarks.models.model_pair import ModelPair, adopt, chain, llama
from isoshard import Plan
from isoshard.core.runtime.hlo_collectives import collectives as collectives_of
from isoshard.jax_bridge import train_step
from isoshard.planner.programs.device_ops import collective_axes
from tools.harness import timing

DEVICES, RATE, STEPS, TURN = 8, 1e-4, 5, 3
AGAIN = "tensor"
"""The plan that is trained twice."""

MODELS: dict[str, tuple[Callable[..., ModelPair], dict[str, int], dict[str, int]]] = {
    "MLP": (
        chain,
        {"layers": 6, "width": 768, "inner": 1536, "batch": 256},
        {"layers": 2, "width": 64, "inner": 128, "batch": 32},
    ),
    "Llama": (
        llama,
        {
            "layers": 4, "width": 256, "inner": 512, "heads": 8, "kv_heads": 8,
            "vocabulary": 4096, "batch": 8, "length": 32,
        },
        {
            "layers": 1, "width": 128, "inner": 128, "heads": 8, "kv_heads": 8,
            "vocabulary": 256, "batch": 16, "length": 16,
        },
    ),
}  # fmt: skip
"""How each is made, its sizes, and those of `--quick`."""

FRAMEWORKS = ("torch", "flax")


@dataclasses.dataclass(frozen=True)
class Layout:
    """A plan and its mesh.

    Attributes:
        mesh: over devices that are here.
        plan: it.
    """

    mesh: Mesh
    plan: Plan


def hand_layouts(name: str) -> dict[str, Layout]:
    """The plans that people write by hand, with the batch kept split between layers.

    Args:
        name: of the model.
    """
    line = iso.make_mesh((DEVICES,), ("data",))
    grid = iso.make_mesh((2, DEVICES // 2), ("data", "model"))
    replicated, tensor = Plan({"*": None}), Plan.tensor_parallel("model")
    both = Plan.fsdp("data", min_bytes=0) * tensor
    results = {
        "data": Layout(line, _over(replicated, ("data",))),
        "FSDP": Layout(line, _over(Plan.fsdp("data", min_bytes=0), ("data",))),
        "tensor": Layout(grid, _over(tensor.otherwise(replicated), ("data",))),
        "FSDP x tensor": Layout(grid, _over(both, ("data",))),
        "tensor over all": Layout(
            iso.make_mesh((DEVICES,), ("model",)), _over(tensor.otherwise(replicated), None)
        ),
    }
    if name == "Llama":
        axes = ("data", "model")
        results["sequence"] = Layout(grid, _over(Plan.fsdp(axes, min_bytes=0), axes))
    else:
        wide = iso.make_mesh((DEVICES // 2, 2), ("data", "model"))
        results["tensor, 4 x 2"] = Layout(wide, results["tensor"].plan)
    return results


def _over(plan: Plan, spec: tuple[str, ...] | None) -> Plan:
    """The same with a spec for the batch and for what layers pass on."""
    between = dict.fromkeys(("*embed_tokens", "*layers.[0-9]"), spec)
    more = Plan({}, default=None, inputs=spec, activations=between if spec else {})
    if plan.product:
        return more * plan
    return dataclasses.replace(plan, inputs=more.inputs, activations=more.activations)


class Training:
    """A model that trains under a layout.

    Attributes:
        step: makes one step on one of `STEPS` batches, by its number, and gives the loss.
        program: gives the text of the program that ran.
    """

    def __init__(self, models: ModelPair, framework: str, layout: Layout):
        """Make it, with weights of seed 0."""
        factory = _torch_training if framework == "torch" else _flax_training
        self.step, self.program = factory(models, layout)

    def collectives(self, mesh: Mesh) -> collections.Counter[tuple[Any, ...]]:
        """Those of the program that ran: kind, axes, bytes -> how often.

        Args:
            mesh: that it ran on.
        """
        results = collections.Counter[tuple[Any, ...]]()
        for collective in collectives_of(self.program()):
            kind = collective.kind.replace("_", "-")
            if axes := collective_axes(kind, collective.bytes, collective.groups, mesh):
                results[kind, axes, collective.bytes] += collective.times
        return results


def _torch_step(models: ModelPair, model: torch.nn.Module) -> Callable[[Any], torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)

    def step(batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = models.torch_loss(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _torch_training(
    models: ModelPair, layout: Layout
) -> tuple[Callable[..., float], Callable[..., str]]:
    mesh, plan = layout.mesh, layout.plan
    model = iso.shard(models.torch(), mesh, plan)
    if any(part.activations for part in plan.factors):
        xs.constrain_activations(model, mesh, plan)
    step = xs.compile(_torch_step(models, model))

    host_batches = {str(index): torch.from_numpy(models.batch(index)) for index in range(STEPS)}
    batches = iso.shard(host_batches, mesh, plan.for_inputs())

    def run(number: int = 0) -> float:
        return float(step(batches[str(number)]))

    return run, lambda: xs.program_text(step)


def _flax_step(models: ModelPair, layout: Layout) -> Any:
    tx = optax.adamw(RATE, weight_decay=0.01)  # as torch has it
    return train_step(models.flax_loss, tx, layout.mesh, layout.plan)


def _flax_training(
    models: ModelPair, layout: Layout
) -> tuple[Callable[..., float], Callable[..., str]]:
    step = _flax_step(models, layout)
    state = step.start(adopt(models.flax(), models.torch()))

    host_batches = {str(index): models.batch(index) for index in range(STEPS)}
    batches = iso.shard(host_batches, layout.mesh, layout.plan.for_inputs())

    def run(number: int = 0) -> float:
        nonlocal state
        state, loss = step(state, batches[str(number)])
        return float(loss)

    return run, lambda: step.lower(state, batches["0"]).compile().as_text()


def planned(models: ModelPair, framework: str, layout: Layout) -> tuple[Any, tuple[Any, ...]]:
    """A step and its arguments as planning takes them: no weights are made.

    Args:
        models: the model.
        framework: one of `FRAMEWORKS`.
        layout: of a Flax step, its first; planning gives it others.
    """
    batch = models.batch(0)
    if framework == "flax":
        shape = jax.ShapeDtypeStruct(batch.shape, jax.dtypes.canonicalize_dtype(batch.dtype))
        return _flax_step(models, layout), (models.flax, shape)
    with torch.device("meta"):
        model = models.torch()
    return _torch_step(models, model), (torch.from_numpy(batch).to("meta"),)


def alone(models: ModelPair) -> list[float]:
    """Losses of plain torch on one CPU, in float64: the reference.

    Args:
        models: the model.
    """
    model = models.torch().double()
    step = _torch_step(models, model)
    batches = (torch.from_numpy(models.batch(number)) for number in range(STEPS))
    return [float(step(b.double() if b.is_floating_point() else b)) for b in batches]


def sent(layouts: Mapping[str, Layout]) -> str:
    """Layouts as a text for another process.

    Args:
        layouts: by name.
    """
    message = {
        name: (tuple(layout.mesh.axis_sizes), layout.mesh.axis_names, layout.plan)
        for name, layout in layouts.items()
    }
    return base64.b64encode(pickle.dumps(message)).decode()


def received(text: str) -> dict[str, Layout]:
    """What `sent` wrote, over the devices of this process.

    Args:
        text: of a process that ran the same code.
    """
    message = pickle.loads(base64.b64decode(text))
    return {
        name: Layout(iso.make_mesh(shape, axes), plan)
        for name, (shape, axes, plan) in message.items()
    }


def measured(
    name: str, framework: str, sizes: dict[str, int], layouts: str, rounds: int, seed: int
) -> dict[str, Any]:
    """Train a model under all layouts, and time their steps in turns.

    Args:
        name: of the model.
        framework: one of `FRAMEWORKS`.
        sizes: of the model.
        layouts: as `sent` writes them.
        rounds: timed turns of each, in which `TURN` steps count.
        seed: of the order of turns.

    Returns:
        By layout: "losses", "ran" (of each collective of its program kind, axes, bytes and how
        often) and "seconds" of each step that counts. "again": only these, of `AGAIN` once more.
    """
    iso.simulate_devices(DEVICES)
    factory, *_ = MODELS[name]
    models, layouts_of = factory(**sizes), received(layouts)
    results, runs = dict[str, Any](), dict[str, Callable[[], float]]()
    for name_of, layout in layouts_of.items():
        training = Training(models, framework, layout)
        losses = [training.step(number) for number in range(STEPS)]
        ran = training.collectives(layout.mesh)
        results[name_of] = {"losses": losses, "ran": [[*key, count] for key, count in ran.items()]}
        runs[name_of] = training.step
    results["again"] = {}
    runs["again"] = again = Training(models, framework, layouts_of[AGAIN]).step
    for number in range(STEPS):
        again(number)
    for name_of, seconds in timing.turns(runs, rounds=rounds, calls=TURN, seed=seed).items():
        results[name_of]["seconds"] = seconds
    return results
