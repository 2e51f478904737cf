"""Every module of torch's own module database, in training and evaluation, equals the CPU.

Compared are the outputs, the gradients of inputs and parameters, and the buffers afterwards
(BatchNorm statistics), for every float32 sample that torch gives.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from typing import Any

import pytest
import torch
from torch.testing._internal.common_modules import module_db
from torch.utils import _pytree as pytree

import isoshard.torch_bridge as xs

INFOS = {info.formatted_name.removeprefix("nn_"): info for info in module_db}

REFUSED: dict[str, tuple[type[Exception], str]] = {}
"""Modules that raise, and what."""


@dataclasses.dataclass
class Run:
    """What one sample left behind, on one device."""

    outputs: list[torch.Tensor]
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]


def leaves(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def differentiable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def move(tree: Any, device: str) -> Any:
    """Inputs on a device, as leaves of their own that require what the sample's require."""

    def leaf(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.detach().clone().to(device).requires_grad_(value.requires_grad)

    return pytree.tree_map(leaf, tree)


def run(module: torch.nn.Module, inputs: Any, device: str) -> Run:
    """One forward and backward pass."""
    module = module.to(device)
    args, kwargs = move((inputs.args, inputs.kwargs), device)
    outputs = [out for out in leaves(module(*args, **kwargs))]
    torch.manual_seed(1)
    wanted = [out for out in outputs if out.requires_grad]
    if wanted:
        seeds = [torch.randn(out.shape, dtype=out.dtype).to(device) for out in wanted]
        torch.autograd.backward(wanted, seeds)
    gradients = {f"input {i}": leaf.grad for i, leaf in enumerate(leaves((args, kwargs)))}
    gradients |= {name: p.grad for name, p in module.named_parameters()}
    return Run(outputs, gradients, dict(module.named_buffers()))


def samples(name: str, training: bool) -> list[tuple[torch.nn.Module, Any]]:
    """A CPU module and its inputs, for each sample of the database."""
    info = INFOS[name]
    torch.manual_seed(0)
    found = []
    for sample in info.module_inputs_func(
        info, device="cpu", dtype=torch.float32, requires_grad=True, training=training
    ):
        if sample.forward_input is None:
            continue
        given = sample.constructor_input
        module = info.module_cls(*given.args, **given.kwargs)
        found.append((module.train(training), sample.forward_input))
    return found


def check(name: str, training: bool) -> int:
    pairs = []
    for module, inputs in samples(name, training):
        got, want = copy.deepcopy(module), module
        pairs.append((run(got, inputs, "jax"), run(want, inputs, "cpu")))
    xs.sync()
    for number, (got, want) in enumerate(pairs):
        compare(got, want, f"{name} sample {number}")
    return len(pairs)


def compare(got: Run, want: Run, where: str) -> None:
    for number, (g, w) in enumerate(zip(got.outputs, want.outputs, strict=True)):
        close(g, w, f"{where} output {number}")
        assert g.requires_grad == w.requires_grad, f"{where} output {number} requires_grad"
    for kind, mine, theirs in (
        ("gradient of", got.gradients, want.gradients),
        ("buffer", got.buffers, want.buffers),
    ):
        assert mine.keys() == theirs.keys()
        for key, w in theirs.items():
            if w is None:
                assert mine[key] is None, f"{where} {kind} {key} is not None"
            else:
                close(mine[key], w, f"{where} {kind} {key}")


def close(got: torch.Tensor, want: torch.Tensor, where: str) -> None:
    assert isinstance(got, xs.XLAShardedTensor), where
    torch.testing.assert_close(
        got.detach().cpu(),
        want.detach(),
        rtol=2e-4,
        atol=2e-5,
        msg=lambda text: f"{where}: {text}",
    )


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", [name for name in INFOS if name not in REFUSED])
def test_a_module_equals_the_cpu(name, training):
    assert check(name, training) > 0
