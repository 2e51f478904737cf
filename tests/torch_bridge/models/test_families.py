"""Model families of `transformers` train as on the CPU: on one device and on a mesh.

A family trains step by step or as one program. Everything is float32 and compared with CPU torch:
losses of AdamW steps, and every gradient, parameter and buffer of the first step, within `RTOL` of
the value plus `ATOL`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P, make_mesh
from isoshard.core.runtime import metrics
from tests.torch_bridge.models.families import FAMILIES, Batch, small

STEPS = 2
RTOL, ATOL = 1e-4, 1e-5

Named = dict[str, torch.Tensor | None]


def adamw(module: torch.nn.Module) -> torch.optim.Optimizer:
    """AdamW whose first step is no sign function of gradients that are zero but for rounding."""
    return torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-4)


@dataclasses.dataclass
class Run:
    """What training gave: losses, programs compiled, and the state after the first step."""

    losses: list[float]
    compilations: list[metrics.Compilation]
    gradients: Named
    parameters: Named
    buffers: Named


def host(named: Iterable[tuple[str, torch.Tensor | None]]) -> Named:
    return {
        name: None if tensor is None else tensor.detach().cpu().clone() for name, tensor in named
    }


def train(name: str, module: torch.nn.Module, put: Callable[[Batch], Batch]) -> Run:
    """Ordinary steps; gradients stay alive until the next one."""
    optimizer = adamw(module)
    losses, compilations, first = [], [], {}
    for number in range(STEPS):
        known = len(metrics.compilations())
        optimizer.zero_grad()
        loss = module(**put(FAMILIES[name].batch(number))).loss
        loss.backward()
        optimizer.step()
        xs.sync()
        losses.append(loss.item())
        compilations += metrics.compilations()[known:]
        if not number:
            first = {
                "gradients": host((key, p.grad) for key, p in module.named_parameters()),
                "parameters": host(module.named_parameters()),
                "buffers": host(module.named_buffers()),
            }
    return Run(losses, compilations, **first)


def on_cpu(name: str) -> Run:
    return train(name, small(name), lambda batch: batch)


def on_jax(name: str, where: str) -> tuple[torch.nn.Module, Callable[[Batch], Batch]]:
    """A model on `jax`, and what brings a batch to it."""
    module = small(name)
    if where == "one device":
        return module.to("jax"), lambda batch: {key: x.to("jax") for key, x in batch.items()}
    mesh = make_mesh((2, 4), ("data", "model"))
    module = iso.shard(module, mesh, FAMILIES[name].plan(module))
    return module, lambda batch: {key: iso.shard(x, mesh, P("data")) for key, x in batch.items()}


def assert_close(got: Named, want: Named) -> None:
    assert got.keys() == want.keys()
    for name, expected in want.items():
        actual = got[name]
        if expected is None or actual is None:
            assert actual is expected, name
            continue
        torch.testing.assert_close(
            actual, expected, rtol=RTOL, atol=ATOL, msg=lambda text, name=name: f"{name}: {text}"
        )


PLAIN = [("resnet", "mesh")]
COMPILED = [("mixtral", "mesh")]


@pytest.mark.parametrize(("name", "where"), PLAIN)
def test_steps_are_those_of_cpu_torch_with_two_compilations(name, where, counted):
    got, want = train(name, *on_jax(name, where)), on_cpu(name)
    assert_close(got.gradients, want.gradients)
    assert_close(got.parameters, want.parameters)
    assert_close(got.buffers, want.buffers)
    assert any(gradient is not None and gradient.any() for gradient in got.gradients.values())
    assert got.losses == pytest.approx(want.losses, rel=RTOL)
    assert len(got.compilations) <= 2, got.compilations
    assert counted("fallbacks") == 0


@pytest.mark.parametrize(("name", "where"), COMPILED)
def test_a_compiled_step_is_one_program(name, where, counted):
    module, put = on_jax(name, where)
    optimizer = adamw(module)

    @xs.compile
    def step(**batch):
        loss = module(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    losses = [step(**put(FAMILIES[name].batch(number))).item() for number in range(STEPS)]
    assert losses == pytest.approx(on_cpu(name).losses, rel=RTOL)
    assert counted("compilations") == 1, metrics.report()
    assert len(step.replays) == 1
