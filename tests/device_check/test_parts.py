"""Samples, models and entries that the check runs; what it measures is tested by running it."""

from __future__ import annotations

import doctest

import jax
import numpy as np
import pytest
import torch

from tools.device_check import entries, environment, exchange, samples, workloads
from tools.device_check.sections import MODELS


@pytest.mark.parametrize("module", [entries, workloads], ids=lambda module: module.__name__)
def test_examples(module):
    result = doctest.testmod(module)
    assert result.attempted and not result.failed


def test_300_entries_are_selected_deterministically_and_evenly():
    names = entries.selected(300)
    assert names == entries.selected(300)
    assert len(set(names)) == 300
    assert not any(name.startswith(entries.OTHER_DATABASES) for name in names)
    order = {name: index for index, name in enumerate(entries.entries())}
    gaps = np.diff(sorted(order[name] for name in names))
    assert gaps.max() <= 10


def test_more_entries_than_there_are():
    with pytest.raises(ValueError, match=r"has \d+ entries to select from, not 5000"):
        entries.selected(5000)


def test_an_entry_is_compared_in_every_dtype():
    info = entries.entries()["add"]
    result = entries.compared(info, samples=1)
    assert list(result) == list(entries.CHECKED)
    assert all(not column["reason"] and column["samples"] == 1 for column in result.values())


def test_a_wrong_value_is_a_failure(monkeypatch):
    read = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: read(tensor) + 1)
    result = entries.compared(entries.entries()["sin"], samples=1)
    assert "wrong: " in result["float64"]["reason"]
    assert result["float64"]["error"] >= 0.5


@pytest.mark.parametrize("name", MODELS)
def test_both_sides_train_in_bfloat16(name):
    problem, work = workloads.problem(name, "cpu"), workloads.by_hand(name, "cpu")
    module = problem.module()
    params, _ = work.arrays(problem.module().float())
    shapes = {key: tuple(p.shape) for key, p in module.named_parameters()}
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert {array.dtype.name for array in params.values()} == {"bfloat16"}
    assert set(params) == set(shapes)
    new, _ = jax.eval_shape(lambda params: work.update(params, params, work.init(params)), params)
    assert {array.dtype.name for array in new.values()} == {"bfloat16"}
    assert workloads.flops(problem) > 6 * sum(p.numel() for p in module.parameters()) / 2


def test_flops_are_those_of_the_formula():
    """6 per weight and token, and for attention 12 per layer, feature and pair of tokens."""
    problem = workloads.problem("gpt2", "gpu")
    size, tokens = problem.size, problem.size.batch * problem.size.length
    positions = size.length * size.width
    with torch.device("meta"):
        weights = sum(p.numel() for p in problem.build().parameters()) - positions
    attention = 12 * size.layers * size.width * size.length
    assert workloads.flops(problem) == pytest.approx(tokens * (6 * weights + attention), rel=1e-2)


def test_samples_of_a_gpu():
    programs = samples.programs("gpu")
    assert len(programs) == 6
    for name in samples.NAMES:
        assert programs[f"{name}, as written"].platform == "cpu"
        program = programs[f"{name}, gpu"]
        assert program.platform == "gpu" and "simulate_devices" not in program.code
        assert "make_mesh((1, 1)" in program.code
        compile(program.code, name, "exec")


def test_a_sample_that_cannot_be_changed():
    with pytest.raises(ValueError, match=r"expected one iso.simulate_devices\(8\)"):
        samples.on_single_device("mesh = iso.make_mesh((4, 2))")


@pytest.mark.parametrize(
    ("code", "platform", "ok"),
    [
        ("print(1)", "gpu", False),
        ("1/0", "cpu", False),
    ],
)
def test_a_program_has_to_print_on_its_platform(code, platform, ok, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    result = samples.run_program(samples.Program(code, platform))
    assert result["ok"] is ok
    assert ("ZeroDivisionError" in result["output"]) == (code == "1/0")


def test_the_environment_has_versions():
    found = {}
    environment.run("environment", {}, lambda **results: found.update(results))
    assert found["versions"]["isoshard"] and found["versions"]["jax"]
    assert found["platform"] == "cpu" and found["torch_cuda"] is None


def test_a_package_that_is_missing(monkeypatch):
    monkeypatch.setattr(environment, "PACKAGES", ("no-such-package",))
    assert environment.versions() == {"no-such-package": None}


@pytest.mark.parametrize("check", exchange.CHECKS, ids=lambda check: check.__name__)
def test_a_check_of_exchange_sees_a_copy(check, monkeypatch):
    """With addresses that differ, or values that are off, none passes."""
    monkeypatch.setattr(exchange, "_expect", _never)
    monkeypatch.setattr(exchange, "_error", _never)
    with pytest.raises(exchange.MismatchError):
        check("cpu")


def _never(*arguments):
    raise exchange.MismatchError
