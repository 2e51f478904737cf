"""Launches that cannot work, or look odd; TEST_KIND says which. No check is reached."""

import dataclasses
import os
import warnings

import isoshard as iso
from isoshard.core.processes import handshake
from isoshard.core.processes.launchers import launch_from


def start():
    kind, rank = os.environ["TEST_KIND"], os.environ["RANK"]
    timeout = float(os.environ["TEST_TIMEOUT"])
    warnings.simplefilter("always", iso.errors.ClusterWarning)
    if kind == "version" and rank == "1":
        found = handshake._version
        handshake._version = lambda name: "0.0.7" if name == "isoshard" else found(name)
    if kind in ("clock", "hosts"):
        _shake_hands(kind, rank, timeout)
    iso.distributed.init_distributed(timeout=timeout)


def _shake_hands(kind, rank, timeout):
    """The start's first step alone: what follows takes longer, and only warns are looked for."""
    report = handshake.env_report(launch_from(os.environ))
    if kind == "clock" and rank == "1":
        now = handshake._now
        handshake._now = lambda: now() - 3600
    if kind == "hosts":
        report = dataclasses.replace(
            report, host="node", machine=f"boot {rank}", address="127.0.1.1"
        )
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    handshake.handshake_by_port(report, address, timeout)
    raise SystemExit(0)


def check_not_reached(world):
    raise AssertionError("the start should have been refused")
