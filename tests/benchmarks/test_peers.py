"""A peer that is missing, fails or hangs is reported, never left out."""

from __future__ import annotations

import pytest

from benchmarks import training
from benchmarks.models import sizes
from benchmarks.peers import launch
from benchmarks.peers.launch import Peer


@pytest.mark.parametrize(
    ("function", "argument", "found"),
    [
        ("operator:index", "mlp", {"problem": "TypeError: 'str' object cannot be interpreted as an "
         "integer"}),
    ],
)  # fmt: skip
def test_a_peer_finds_something_or_says_why_not(function, argument, found):
    peer = Peer(function, variables={"COLOUR": "blue"})
    assert launch.run(peer, argument, limit=60) == found


def test_losses_that_differ_end_the_benchmark():
    facts = {"pure JAX": {"losses": [1.0, 0.5]}, "ours": {"losses": [1.0, 0.5002]}}
    problem = sizes.problem("mlp", "quick")
    training.agree(problem, facts, 1e-3)
    assert facts["ours"]["loss_difference"] == pytest.approx(4e-4)
    with pytest.raises(RuntimeError, match=r"mlp: the losses of 'ours' are off by 4.0e-04"):
        training.agree(problem, facts, 1e-4)


def test_losses_that_are_not_numbers_end_it_too():
    facts = {"pure JAX": {"losses": [1.0]}, "ours": {"losses": [float("nan")]}}
    with pytest.raises(RuntimeError, match="off by nan"):
        training.agree(sizes.problem("mlp", "quick"), facts, 1e-4)


def test_a_peers_row_has_our_times_over_its_own():
    def row(median):
        return {"median_ms": median, "best_ms": median, "losses": [1.0]}

    facts = {"pure JAX": row(10.0), "torch, compiled": row(12.0), "torch, lazy": row(13.0)}
    peers = {"torch_xla, SPMD": row(20.0), "DTensor, gloo": {"problem": "not installed"}}
    table = training.peer_table("mlp", peers, facts)
    assert peers["torch_xla, SPMD"]["ratio"] == 2.0
    assert peers["torch_xla, SPMD"]["ours"] == {"torch, compiled": 0.6, "torch, lazy": 0.65}
    assert [column.header for column in table.columns][4:6] == ["compiled to it", "lazy to it"]
    assert [len(list(column.cells)) for column in table.columns] == [2] * 8
