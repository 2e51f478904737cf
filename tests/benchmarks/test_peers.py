"""A peer that is missing, fails or hangs is reported, never left out."""

from __future__ import annotations

import pytest

from benchmarks import environments, training
from benchmarks.models import sizes
from benchmarks.peers import clock, launch
from benchmarks.peers.launch import Peer


@pytest.fixture
def peer(tmp_path, monkeypatch):
    """A peer whose module has the given source."""
    monkeypatch.setattr(launch, "ROOT", tmp_path)

    def make(source: str) -> Peer:
        (tmp_path / "a_peer.py").write_text(source)
        return Peer("a_peer", variables={"COLOUR": "blue"})

    return make


def test_what_a_peer_prints_is_read(peer):
    source = "import json, os; print('noise'); print(json.dumps({'mlp': os.environ['COLOUR']}))"
    assert launch.run(peer(source), key="mlp") == "blue"


def test_a_peer_that_fails_says_why(peer):
    found = launch.run(peer("raise RuntimeError('no such device')"), key="mlp")
    assert found == {"problem": "ended with status 1: RuntimeError: no such device"}


def test_a_peer_that_hangs_is_ended(peer):
    found = launch.run(peer("import time; time.sleep(60)"), key="mlp", limit=1)
    assert found == {"problem": "took more than 1 s"}


@pytest.mark.long
def test_a_peer_that_is_not_installed_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(environments, "ROOT", tmp_path)
    found = launch.training(["mlp"], "quick", steps=1)
    assert found["torchax, jitted"]["mlp"] == {"problem": "not installed (make bench-peers)"}


def test_a_workload_that_fails_is_a_finding(capsys, monkeypatch):
    def fail(problem, steps):
        raise ValueError("no rule for\nconv")

    monkeypatch.setattr("sys.argv", ["peer", "mlp"])
    clock.report(fail, clock.options())
    assert capsys.readouterr().out == '{"mlp": {"problem": "ValueError: no rule for"}}\n'


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
