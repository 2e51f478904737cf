"""The matrix of changes: what a program can change between two calls of a step.

Every case runs three times, is changed, runs twice, is changed back, and runs once more, in each
mode beside CPU torch. After each call results, parameters, buffers, optimizer state and Python
counters must be the same; or the mode raises an error that names what changed. A mode that gives
another result without a word fails.
"""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch

from tests.torch_bridge.engine.capture.changes import (
    attacks,
    containers,
    effects,
    functions,
    models,
    objects,
    optimizers,
    surroundings,
    training,
)
from tests.torch_bridge.engine.capture.changes.running import SilentChangeError, check, shows
from tests.torch_bridge.engine.capture.changes.worlds import CASES
from tests.torch_bridge.older_torch import BEFORE_2_13

TABLES = (
    attacks,
    containers,
    effects,
    functions,
    models,
    objects,
    optimizers,
    surroundings,
    training,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


@pytest.fixture(autouse=True)
def fresh():
    """Dynamo without what it traced for other cases."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


UNSEEN_BY_DYNAMO = pytest.mark.xfail(
    BEFORE_2_13,
    raises=SilentChangeError,
    reason="torch.compile of torch 2.10 to 2.12 guards none of these, on the CPU either",
)
UNSEEN = (
    "an attribute of the class, through the class",
    "a default argument of a called function",
    "the class of a submodule",
)


def rows(*modes: str) -> list[Any]:
    return [
        pytest.param(
            case,
            mode,
            id=f"{mode}-{case.name.replace(' ', '_')}",
            marks=UNSEEN_BY_DYNAMO if mode == "dynamo" and case.name in UNSEEN else (),
        )
        for mode in modes
        for case in CASES
        if mode not in case.without
    ]


@pytest.mark.parametrize(("case", "mode"), rows("lazy", "compile", "scan", "accumulate"))
def test_a_change_is_seen_or_refused_by_name(case, mode):
    check(case, mode)


@pytest.mark.parametrize(("case", "mode"), rows("dynamo"))
def test_a_change_under_torch_compile_is_seen_or_refused_by_name(case, mode):
    check(case, mode)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "_"))
def test_the_reference_shows_the_change(case):
    assert shows(case) is not bool(case.unseen)


def test_the_matrix_is_as_large_as_it_should_be():
    names = [case.name for case in CASES]
    assert len(TABLES) == 9
    assert max(collections.Counter(names).values()) == 1
    assert len(names) >= 80
    assert all(case.names for case in CASES)
