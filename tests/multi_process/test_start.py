"""`iso.distributed.init_distributed`: every way to be started, and every way that cannot work."""

from __future__ import annotations

import re

import pytest

from tests.multi_process import ranks

CHECKS = ranks.checks_of(ranks.job_module("start"))


def _slurm(size):
    port = str(ranks.free_port())
    return lambda rank: {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "SLURM_NTASKS": str(size),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "JAX_COORDINATOR_PORT": port,
        "TEST_LAUNCHER": "slurm",
    }


def _open_mpi(size):
    port = str(ranks.free_port())
    return lambda rank: {
        "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://127.0.0.1:34911",
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "JAX_COORDINATOR_PORT": port,
        "TEST_LAUNCHER": "open mpi",
    }


def _numbers(size):
    port = str(ranks.free_port())
    return lambda rank: {"TEST_PORT": port, "TEST_SIZE": str(size), "TEST_RANK": str(rank)}


def test_torchrun(tmp_path):
    outcome = ranks.torchrun("start", 2, tmp_path, nodes=2)
    for check in CHECKS:
        outcome.assert_passed(check, 2)
    _assert_quiet_end(outcome, tmp_path, 2, agents=_OF_AN_AGENT)


@pytest.mark.parametrize(
    ("how", "environment"),
    [
        ("slurm", _slurm),
        ("open mpi", _open_mpi),
        ("jax", _numbers),
        ("torch", ranks.as_torchrun),
        ("two-devices", ranks.as_torchrun),
    ],
)
def test_other_launchers(how, environment, tmp_path):
    outcome = ranks.processes("start", 2, tmp_path, environment(2), args=[how])
    for check in CHECKS:
        outcome.assert_passed(check, 2)
    _assert_quiet_end(outcome, tmp_path, 2)


def test_without_torch(tmp_path):
    own = ranks.as_torchrun(2)
    outcome = ranks.processes("without_torch", 2, tmp_path, own, forked=False)
    outcome.assert_passed("check_jax_computes_over_all", 2)
    assert outcome.code == 0 and not _said(outcome)


# The agent of one node ends, and its store with it, before the other agent has left its barrier.
_OF_AN_AGENT = r"|^E\d{4} .*torch/distributed/elastic|^\[W.* TCPStore\.cpp:\d+\] \[c10d\] "
_OF_AN_AGENT += r"|^Exception raised from|^<omitting python frames>|^frame #\d+"


def _assert_quiet_end(outcome, scratch, size, agents=""):
    """All exit with 0, soon after the last has come to its end, and nobody complains."""
    assert outcome.code == 0, outcome.output
    last = max(float((scratch / f"done-{rank}").read_text()) for rank in range(size))
    assert max(outcome.ended) - last < 15  # mostly Python's own end, on a busy machine
    assert sorted(_said(outcome, agents)) == [f"rank {rank} is done" for rank in range(size)]


def _said(outcome, agents=""):
    """What ranks printed, without what gloo says when it connects, by all ranks at once.

    `agents`: patterns of what torchrun's own agents log.
    """
    others = r"\[Gloo\]|peer ranks|^\s*\d*\s*$" + agents
    return [line for line in outcome.output.splitlines() if not re.search(others, line)]


REFUSED = {
    "late": (
        lambda: ranks.as_torchrun(1)(0),
        r"JAX has started its devices already.*call iso\.distributed\.init_distributed\(\) before",
    ),
    "several": (
        lambda: {
            **ranks.as_torchrun(1)(0),
            "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        },
        r"rank 0 has 4 cpu devices, not 1; DTensor's ranks have one each. Take --xla_force",
    ),
    "half-environment": (
        lambda: ranks.as_torchrun(1)(0),
        r"environment of torchrun is not complete:\n  MASTER_PORT is not set",
    ),
    "alone": (
        lambda: ranks.as_torchrun(2)(0),
        r"cannot run together:\n  rank 1 of 2 did not connect within 3 s. Were they started",
    ),
    "alone-in-slurm": (
        lambda: _slurm(2)(1),
        r"rank 1 \(.*\) of 2 could not reach rank 0 at 127\.0\.0\.1:\d+ within 3 s: "
        r"no process listens",
    ),
}


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    """One launch of processes that have nothing to do with each other."""
    environments = [{**REFUSED[kind][0](), "TEST_KIND": kind} for kind in REFUSED]
    scratch = tmp_path_factory.mktemp("refused")
    return ranks.processes("refused", len(REFUSED), scratch, environments.__getitem__, timeout=90)


@pytest.mark.parametrize("kind", REFUSED)
def test_refused(refused, kind):
    number = [*REFUSED].index(kind)
    output = refused.outputs[number]
    assert refused.codes[number] == 1, output
    assert re.search(f"(?s)DistributedError: .*{REFUSED[kind][1]}", output), output
    assert not refused.reports


def test_a_process_alone_is_a_run_of_one(tmp_path):
    outcome = ranks.processes("alone", 1, tmp_path, lambda rank: {})
    for check in ranks.checks_of(ranks.job_module("alone")):
        outcome.assert_passed(check, 1)
    assert outcome.code == 0 and not outcome.output
