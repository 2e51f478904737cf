"""Every name of a tensor, and every public function, in a step that is captured.

Nothing hands out the array behind a tensor in a captured step, unless a replay hands out another
one: three calls of a compiled step, with a tensor of other values in each, give what the step
gives without `compile`, or the first call is refused. `EXAMPLES=500` tries all calls in all ways;
without, each call is made in one of them.
"""

from __future__ import annotations

import os

import pytest
import torch

from .captured_walk import Walk, references
from .tensor_calls import conversions, methods
from .verb_calls import unlisted, verbs

EVERY = "EXAMPLES" in os.environ
WALKS = [("compile", "held"), ("repeat", "computed"), ("checkpoint", "lazy")]


def test_all_names_are_called():
    assert not methods()[1] and not unlisted()


def made():
    """All calls, each name once."""
    calls = [*methods()[0], *conversions(), *verbs()]
    assert len({call.name for call in calls}) == len(calls)
    return calls


def walked(way, origin, calls):
    """The walk over some calls."""
    wanted, raised = references(calls, origin)
    walk = Walk(way, origin, wanted)
    walk.run([call for call in calls if call.name in wanted])
    assert len(walk.replayed) > len(walk.refused)
    return walk, raised


@pytest.mark.parametrize("number", range(len(WALKS)))
def test_captured_calls_are_replayed_or_refused(number):
    way, origin = WALKS[number]
    walk, raised = walked(way, origin, made()[number :: len(WALKS)])
    assert not walk.faults
    assert not {name: error for name, error in raised.items() if type(error) is AttributeError}


@pytest.mark.filterwarnings("ignore")
def test_calls_in_graphs_of_dynamo():
    torch._dynamo.reset()
    walk, _ = walked("torch.compile", "held", made()[:: 1 if EVERY else 20])
    assert not walk.faults


@pytest.mark.skipif(not EVERY, reason="tried with EXAMPLES=500")
@pytest.mark.parametrize("origin", ["held", "lazy", "computed"])
@pytest.mark.parametrize("way", ["compile", "repeat", "checkpoint"])
def test_all_calls(way, origin):
    walk, _ = walked(way, origin, made())
    assert not walk.faults


@pytest.mark.skipif(not EVERY, reason="tried with EXAMPLES=500")
def test_all_calls_that_are_pure():
    calls = [call for call in made() if not call.name.endswith("_")]
    walk, _ = walked("assume_pure", "held", calls)
    assert not walk.faults
