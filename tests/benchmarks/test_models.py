"""At full size the models are the published ones; written by hand they train as in torch."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.by_hand import models
from benchmarks.by_hand.step import Training, make_mesh
from benchmarks.models import resnet, sizes

ROOT = Path(__file__).resolve().parents[2]
ELSEWHERE = {"torchax_step", "torchax_eager", "torch_xla_step", "torch_xla_tracing"}
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "benchmarks").rglob("*.py")
    if path.stem not in {"__init__", *ELSEWHERE}
)


def test_examples():
    failed = [doctest.testmod(importlib.import_module(name)).failed for name in MODULES]
    assert failed == [0] * len(MODULES)


@pytest.mark.parametrize(
    ("name", "parameters"), [("gpt2", 124_439_808), ("resnet50", 25_557_032), ("vit", 86_567_656)]
)
def test_at_full_size_they_are_the_published_models(name, parameters):
    with torch.device("meta"):
        module = sizes.problem(name, "gpu").build()
    assert sum(parameter.numel() for parameter in module.parameters()) == parameters


@pytest.mark.parametrize("name", ["mlp", "resnet50"])
def test_the_hand_written_step_trains_as_torch_does(name, monkeypatch):
    monkeypatch.setattr(resnet, "STAGES", (1, 2))
    problem = sizes.problem(name, "quick")
    training = Training(models.by_hand(problem), make_mesh())
    module = problem.module()
    optimizer = problem.optimizer(module.parameters())
    for number in range(2):
        ours = float(training.run(*training.batch(number)))
        theirs = float(problem.step(module, optimizer, *problem.tensors(number)))
        assert ours == pytest.approx(theirs, rel=1e-4)
    _, _, buffers = training.state
    for name, buffer in module.named_buffers():
        if name in buffers:
            np.testing.assert_allclose(buffers[name], buffer, rtol=1e-3, atol=1e-4)
    assert len(buffers) == 2 * sum("running_mean" in name for name, _ in module.named_buffers())
