"""What users bring: programs of other libraries, each a function of the device it runs on.

A case makes everything on the CPU from fixed seeds, moves it with `.to(device)` (or by the one line
that the library has for it), and returns numbers that must be those of CPU torch. Where the device
is "cpu" a program in JAX runs on one device, without isoshard.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P

Numbers = list[Any]
ON_A_MESH = "iso.shard(model, mesh, Plan.fsdp(..))"


@dataclasses.dataclass(frozen=True)
class Case:
    """A program of a library.

    Attributes:
        library: the name of its distribution.
        what: what it does, in a few words.
        line: the line that differs from a CPU program; empty for none.
        run: takes the device's name, and returns tensors, arrays and numbers.
        rtol: how far they may be from CPU torch's, relative to the largest of a tensor.
        again: what it asks of isoshard is asked by another case, or a test elsewhere, as well: the
            suite leaves it out, and `python -m tests.ecosystem` runs all.
    """

    library: str
    what: str
    line: str
    run: Callable[[str], Numbers]
    rtol: float = 1e-4
    again: bool = False


ENTERED: list[Case] = []


def case(
    library: str, what: str, line: str = '.to("jax")', rtol: float = 1e-4, again: bool = False
) -> Any:
    """Enter a function in the table."""

    def entered(run: Callable[[str], Numbers]) -> Callable[[str], Numbers]:
        ENTERED.append(Case(library, what, line, run, rtol, again))
        return run

    return entered


def data(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers, the same in every run."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def whole_numbers(below: int, *shape: int, seed: int = 0) -> torch.Tensor:
    """Integers from 0 on, the same in every run."""
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(seed))


TOKENS = whole_numbers(64, 2, 10, seed=3)


def trained(
    model: torch.nn.Module,
    loss_of: Callable[[], torch.Tensor],
    compiled: bool = False,
    rate: float = 1e-2,
) -> Numbers:
    """The losses of three steps of SGD, the last gradients, parameters and running statistics."""
    weights = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.SGD(weights, lr=rate)

    def step() -> tuple[torch.Tensor, list[torch.Tensor]]:
        loss = loss_of()
        loss.backward()
        gradients = [one.grad for one in weights if one.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), gradients

    if compiled:
        step = xs.compile(step)
    losses = []
    for _ in range(3):
        loss, gradients = step()
        losses.append(loss.item())
    statistics = [one for name, one in model.named_buffers() if "running" in name]
    return [*losses, *map(in_one, (gradients, [*model.parameters(), *statistics]))]


def in_one(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """All numbers of some tensors, on the CPU."""
    return torch.cat([one.detach().cpu().flatten() for one in tensors])


def two_by_four() -> Any:
    """The mesh of the cases that need one."""
    return iso.make_mesh((2, 4), ("data", "model"))


def laid(model: torch.nn.Module, device: str, plan: Any = None) -> torch.nn.Module:
    """The model over the mesh, by `Plan.fsdp` where no plan is given; as it is for the CPU."""
    if device == "cpu":
        return model
    model = iso.shard(model, two_by_four(), plan or iso.Plan.fsdp("model", min_bytes=512))
    if not any("model" in one.partition_spec for one in model.parameters()):
        raise AssertionError("the plan splits no parameter")
    return model


def in_rows(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """A batch whose rows are split over the mesh; as it is for the CPU."""
    return tensor if device == "cpu" else iso.shard(tensor, two_by_four(), P("data"))


def three_steps(
    library: str,
    name: str,
    make: Callable[[], torch.nn.Module],
    batch: dict[str, Any],
    loss_of: Callable[..., torch.Tensor],
    *,
    plan: Callable[[torch.nn.Module], iso.Plan] | None = None,
    compiled: bool = True,
    rate: float = 1e-2,
    on_a_mesh: bool | None = True,
) -> None:
    """Enter a model twice: on one device step by step, and on a mesh with the step compiled.

    Args:
        library: the name of its distribution.
        name: of the model.
        make: makes it, after torch's seed is set.
        batch: what the loss is of; tensors are moved.
        loss_of: takes the model and the batch's values by name.
        plan: of the layout; `Plan.fsdp` where it is None.
        compiled: whether the step can be captured as one program; else it is not on a mesh either.
        rate: of learning.
        on_a_mesh: which of the two the suite runs; where XLA takes long to partition it, the other;
            None for neither, where models like it are run.
    """

    def run(device: str, mesh: bool) -> Numbers:
        torch.manual_seed(0)
        model = make().train()
        put = in_rows if mesh else torch.Tensor.to
        model = laid(model, device, plan and plan(model)) if mesh else model.to(device)
        given = {k: put(v, device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
        in_one_program = mesh and compiled and device != "cpu"
        return trained(model, lambda: loss_of(model, **given), in_one_program, rate)

    title = f"{name}: three training steps"
    case(library, title, again=on_a_mesh is not False)(lambda device: run(device, False))
    line = "iso.shard(model, mesh, plan)" if plan else ON_A_MESH
    line += ", xs.compile" * compiled
    case(library, f"{name} on a mesh", line, again=not on_a_mesh)(lambda device: run(device, True))


def of_pictures(
    library: str, name: str, make: Callable[[], torch.nn.Module], side: int = 32, **options: Any
) -> None:
    """Enter a classifier of pictures, as `three_steps` does."""
    batch = {"x": data(4, 3, side, side), "labels": torch.tensor([1, 3, 0, 2])}
    loss = torch.nn.functional.cross_entropy
    three_steps(library, name, make, batch, lambda m, x, labels: loss(m(x), labels), **options)
