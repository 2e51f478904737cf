"""The matrix of changes: what a program can change between two calls of a step.

Every case runs some times, and twice after an edit, in a compiled step beside CPU torch; some of
them, by their names, after a second edit too, which takes the first back, and in another mode.
After each call results, parameters, buffers, optimizer state and Python counters must be the same;
or the mode raises an error that names what changed. A mode that gives another result without a word
fails.
"""

from __future__ import annotations

import collections

import pytest
import torch

from tests.torch_bridge.engine.capture.changes import (  # noqa: F401 - they register cases
    functions,
    models,
    objects,
    optimizers,
    side_effects,
    surroundings,
    training,
)
from tests.torch_bridge.engine.capture.changes.running import SilentChangeError, check
from tests.torch_bridge.engine.capture.changes.worlds import CASES, picked
from tests.torch_bridge.older_torch import BEFORE_2_13

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]

OTHERS = ("lazy", "scan", "accumulate")
UNSEEN_BY_DYNAMO = pytest.mark.xfail(
    BEFORE_2_13,
    raises=SilentChangeError,
    reason="torch.compile of torch 2.10 to 2.12 does not guard it, on the CPU either",
)
UNSEEN = ("an attribute of the class, through the class",)
SEEN = ("a buffer replaced, and changed in place",)
"""What `torch.compile` runs: its guards are dynamo's own."""


def rows():
    """Each case compiled, and some in another mode."""
    for case in CASES:
        name = case.name.replace(" ", "_")
        yield pytest.param(case, "compile", id=f"compile-{name}")
        mode = (*OTHERS, *[""] * 34)[picked(case.name, 37)]
        if case.name in (*UNSEEN, *SEEN):
            mode = "dynamo"
        if mode and mode not in case.without:
            marks = UNSEEN_BY_DYNAMO if case.name in UNSEEN else ()
            yield pytest.param(case, mode, id=f"{mode}-{name}", marks=marks)


@pytest.mark.parametrize(("case", "mode"), list(rows()))
def test_a_change_is_seen_or_refused_by_name(case, mode):
    if mode == "dynamo":
        torch.compiler.reset()
    check(case, mode)


def test_the_matrix_names_each_case_once():
    assert max(collections.Counter(case.name for case in CASES).values()) == 1
    assert all(case.names for case in CASES)
    assert {*SEEN, *UNSEEN} <= {case.name for case in CASES}
