"""A random program, a random edit, and the step again: as on the CPU, or an error that names it."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import HealthCheck, example, given, note, settings

import isoshard.torch_bridge as xs
from tests.torch_bridge.engine.capture.changes import drawn

CALLS = 2
"""Calls before the first edit, and after each."""


def run(program: drawn.Program, device: str, compiled: bool) -> list[np.ndarray | Exception]:
    """The result of every call, up to the first error."""
    step, root = drawn.stepped(program, device)
    step = xs.compile(step) if compiled else step
    x = torch.tensor([0.5, -1.0, 2.0, 0.25], device=device)
    found: list[np.ndarray | Exception] = []
    for place in (None, *program.edits):
        if place is not None:
            drawn.edit(root, program.tree, *place, device)
        for _ in range(CALLS):
            try:
                found.append(step(x).detach().cpu().numpy().copy())
            except Exception as error:
                return [*found, error]
    return found


def check(program: drawn.Program, compiled: bool) -> None:
    note(drawn.source(program))
    wanted = run(program, "cpu", compiled=False)
    found = run(program, "jax", compiled)
    for number, (got, want) in enumerate(zip(found, wanted, strict=True)):
        assert isinstance(want, np.ndarray)
        if isinstance(got, Exception):
            named = any(name in str(got) for name in drawn.names_of(program))
            assert named, f"call {number} raised what names nothing: {got!r}"
            return
        message = f"call {number} is silently wrong"
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6, err_msg=message)


def bounded(examples: int):
    """The same examples in every run."""
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
        print_blob=False,
    )


DEEP = drawn.Program(
    drawn.Node("object", (drawn.Node("list", (drawn.Node("dict", (drawn.Leaf("float", 0),)),)),)),
    "closure",
    (((0, 0, 0), "plain"),),
    (((0, 0, 0), 1),),
)


@bounded(14)
@example(DEEP)
@given(drawn.programs())
def test_a_compiled_step_follows_its_edits(program):
    check(program, compiled=True)


@bounded(4)
@given(drawn.programs())
def test_a_recorded_step_follows_its_edits(program):
    check(program, compiled=False)
