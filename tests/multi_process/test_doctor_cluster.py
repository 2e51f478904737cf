"""`isoshard doctor --cluster`: said once, by rank 0, and every rank ends with its status."""

from __future__ import annotations

import json
import re

import jax
import pytest

from isoshard.cli.cluster_links import distances
from tests.multi_process import ranks


def _environments():
    odd, version, well = ranks.as_torchrun(3), ranks.as_torchrun(2), ranks.as_torchrun(2)
    closed = {"TEST_CLOSED": str(ranks.free_port())}
    return {
        "odd": [{**odd(rank), **closed, "TEST_ARGS": "--timeout 40"} for rank in range(3)],
        "version": [{**version(rank), "TEST_ARGS": "--timeout 60"} for rank in range(2)],
        "well": [{**well(rank), "TEST_ARGS": "--json"} for rank in range(2)],
        "alone": [{"TEST_ARGS": "--json"}],
        "below slurm": [{"SLURM_NTASKS": "4", "TEST_ARGS": ""}],
    }


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """What each process of each kind said; one launch for all, as most of the time is imports."""
    kinds = _environments()
    listed = [{**one, "TEST_KIND": kind} for kind, those in kinds.items() for one in those]
    scratch = tmp_path_factory.mktemp("doctor")
    outcome = ranks.processes("doctor_cluster", len(listed), scratch, listed.__getitem__)
    assert None not in outcome.codes, outcome.output
    said = iter(zip(outcome.codes, outcome.outputs, strict=True))
    return {kind: [next(said) for _ in those] for kind, those in kinds.items()}


def _data(output):
    return json.loads(output[output.index("{\n") : output.rindex("}") + 1])


def test_torchrun(launched):
    (first, output), (second, other) = launched["well"]
    assert first == second == 0, output
    assert output.count('"healthy"') == 1 and '"healthy"' not in other
    data = _data(output)
    assert (data["healthy"], data["launcher"], data["size"], data["wrong"]) == (True, *SEEN)
    assert re.fullmatch(r"127\.0\.0\.1:\d+", data["coordinator"])
    for rank, one in enumerate(data["ranks"]):
        assert one["note"]["rank"] == rank and one["note"]["versions"]["jax"] == jax.__version__
        [link] = one["links"]
        assert (link["start"], link["end"], link["fault"]) == (rank, 1 - rank, "")
        assert 0 < link["round_trip"] < 1 and abs(link["ahead"]) < 1 and link["rate"] > 1e6
        assert "127.0.0.1" in one["interfaces"].values() and one["devices"] == "1 x cpu"
        assert {name.partition(",")[0] for name in one["rates"]} == {
            *("host to cpu", "cpu to host", "JAX", "torch")
        }
        assert min(one["rates"].values()) > 1e5


SEEN = ("torchrun", 2, [])


def test_what_is_odd_is_named_once(launched):
    [(code, said), *others] = launched["odd"]
    assert [code, *(code for code, _ in others)] == [1, 1, 1]
    assert not any("✗" in output or "Launch" in output for _, output in others)
    wrong = [line for line in said.splitlines() if line.startswith("✗")]
    assert len(wrong) == 3, said
    assert re.search(r"clock of rank 1 \(\S+\) is 36\d\d\.\d s ahead of rank 0's: start", wrong[0])
    for start, line in zip((0, 1), wrong[1:], strict=True):
        assert re.search(rf"no connection from rank {start} \(.+\) to rank 2 \(.+\): .*ref", line)
        assert "free ports, " in line and "GLOO_SOCKET_IFNAME" in line
    assert re.search(r"\+1 +2 of 3 ", said) and re.search(r"\+2 +2 of 3 ", said), said


def test_another_version_is_said_once(launched):
    [(code, said), (other_code, other)] = launched["version"]
    assert code == other_code == 1
    assert re.search(r"jax is \S+ on rank 0 \(.+\), 0.0.7 on rank 1 \(.+\): install", said), said
    assert "0.0.7" not in other


def test_alone(launched):
    [(code, said)] = launched["alone"]
    data = _data(said)
    assert code == 0 and data["healthy"] and data["launcher"] is None and data["size"] == 1


def test_alone_where_others_may_be(launched):
    [(code, said)] = launched["below slurm"]
    assert code == 1
    assert re.search(
        r"✗ rank 0: .*SLURM_NTASKS=4 looks like SLURM with others: start .* by srun", said
    )


def test_few_ranks_call_all_and_many_call_few():
    assert distances(1) == []
    assert distances(8) == [1, 2, 3, 4, 5, 6, 7]
    assert len(distances(1024)) == 10 and max(distances(1000)) < 1000
