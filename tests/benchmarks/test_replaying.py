"""The replay and the jitted program that it is compared with are the same program."""

from __future__ import annotations

import torch

import isoshard.torch_bridge as xs
from benchmarks import replaying


def test_the_baseline_takes_what_the_step_takes_and_goes_on():
    step, batch = replaying.compiled_step("SGD", 12)
    call, arrays = replaying.jitted_program(step.last)
    first = call()
    second = call()
    assert len(first) == len(second) == 12 + 1
    xs.sync(wait=True)
    before = step(batch).item()
    assert step(batch).item() != before
    assert arrays == 12 + 3


def test_results_take_the_place_of_inputs_of_their_shape():
    square, row = (torch.ones(shape).numpy() for shape in ((2, 2), (3,)))
    avals, results = [square, row, square, row], [row, square, row, row]
    assert replaying.replaced((0, 1, 3), avals, results) == [(0, 1), (1, 0), (3, 2)]
