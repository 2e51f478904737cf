"""What newcomers do wrong, and what they are told: what, where, and the way out. None is silent."""

from __future__ import annotations

import collections
import subprocess
import sys
import warnings

import numpy as np
import pytest

import isoshard as iso
from isoshard import P

from . import arrays, elsewhere, plans, steps, tensors  # noqa: F401  (each enters its mistakes)
from .mistakes import MISTAKES, Desk, Mistake, outcome


@pytest.mark.parametrize("one", MISTAKES, ids=lambda one: one.name)
def test_a_mistake_is_told(one, tmp_path):
    told = outcome(one, Desk(tmp_path))
    assert told is not None, "silent"
    assert isinstance(told, one.told), f"{type(told).__name__}: {told}"
    assert [text for text in one.texts if text not in str(told)] == [], str(told)


def test_there_are_many_and_each_says_two_things():
    assert len(MISTAKES) >= 103
    assert [one.name for one in MISTAKES if len(one.texts) < 2] == []
    names = collections.Counter(one.name for one in MISTAKES)
    assert [name for name, count in names.items() if count > 1] == []


def test_silence_and_other_words_are_seen(tmp_path):
    assert outcome(Mistake(lambda _: None, ValueError, ()), Desk(tmp_path)) is None

    def warns(_):
        warnings.warn("a", UserWarning, stacklevel=1)

    assert str(outcome(Mistake(warns, UserWarning, ()), Desk(tmp_path))) == "a"


def test_what_is_right_is_silent():
    """The right forms of what is told above, with every warning an error."""
    mesh = iso.make_mesh((2, 4), ("x", "y"))
    tree = {"up.kernel": np.ones((8, 8), np.float32), "up.bias": np.ones(8, np.float32)}
    plan = iso.Plan({"*up.*": iso.Linear(out="y"), "*norm*": None})
    laid = iso.shard(tree, mesh, plan)
    assert laid["up.kernel"].sharding.spec == P(None, "y")
    assert laid["up.bias"].sharding.spec == P("y")


def test_the_device_without_the_bridge():
    """Torch's own words, as nothing of ours is loaded: the troubleshooting page has them."""
    code = "import isoshard, torch; torch.ones(2).to('jax')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1 and "Expected one of cpu" in done.stderr
