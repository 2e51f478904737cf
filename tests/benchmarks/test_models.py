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
from benchmarks.models import llama, sizes

LLAMA = llama.Size(
    layers=2, width=32, hidden=64, heads=4, kv_heads=2, vocabulary=64, length=8, batch=4
)
ROOT = Path(__file__).resolve().parents[2]
ELSEWHERE = {"torchax_step", "torchax_eager", "torch_xla_step", "torch_xla_tracing"}
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "benchmarks").rglob("*.py")
    if path.stem not in {"__init__", *ELSEWHERE}
)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("gpt2", 124_439_808), ("resnet50", 25_557_032), ("vit", 86_567_656)],
)
def test_at_full_size_they_are_the_published_models(name, parameters):
    with torch.device("meta"):
        module = sizes.problem(name, "gpu").build()
    assert sum(parameter.numel() for parameter in module.parameters()) == parameters


@pytest.mark.parametrize("name", sizes.SIZES)
def test_reduced_models_differ_in_width_only(name):
    full, reduced = (sizes.problem(name, scale).build for scale in ("gpu", "cpu"))
    with torch.device("meta"):
        kept = [[name for name, _ in build().named_parameters()] for build in (full, reduced)]
    assert kept[0] == kept[1]


@pytest.mark.parametrize("name", ["mlp", "gpt2", "vit", "resnet50", "llama"])
def test_the_hand_written_step_trains_as_torch_does(name):
    problem = llama.problem(LLAMA) if name == "llama" else sizes.problem(name, "quick")
    training = Training(models.by_hand(problem), make_mesh())
    module = problem.module()
    optimizer = problem.optimizer(module.parameters())
    for number in range(3):
        ours = float(training.run(*training.batch(number)))
        theirs = float(problem.step(module, optimizer, *problem.tensors(number)))
        assert ours == pytest.approx(theirs, rel=1e-4)
    _, _, buffers = training.held
    for name, buffer in module.named_buffers():
        if name in buffers:
            np.testing.assert_allclose(buffers[name], buffer, rtol=1e-3, atol=1e-4)
    assert len(buffers) == 2 * sum("running_mean" in name for name, _ in module.named_buffers())
