"""Launches that cannot work, or look odd; TEST_KIND says which. No check is reached."""

import dataclasses
import os
import warnings

import isoshard as iso
from isoshard.core.processes import notes, roll_call
from isoshard.core.processes.launchers import launch_from


def start():
    kind, rank = os.environ["TEST_KIND"], os.environ["RANK"]
    timeout = float(os.environ["TEST_TIMEOUT"])
    warnings.simplefilter("always", iso.errors.ClusterWarning)
    if kind == "version" and rank == "1":
        found = notes._version
        notes._version = lambda name: "0.0.7" if name == "isoshard" else found(name)
    if kind in ("clock", "hosts"):
        _call_the_roll(kind, rank, timeout)
    iso.distributed.init_distributed(timeout=timeout)


def _call_the_roll(kind, rank, timeout):
    """The start's first step alone: what follows takes longer, and only warns are looked for."""
    note = notes.note_of(launch_from(os.environ))
    if kind == "clock" and rank == "1":
        now = roll_call._now
        roll_call._now = lambda: now() - 3600
    if kind == "hosts":
        note = dataclasses.replace(note, host="node", machine=f"boot {rank}", address="127.0.1.1")
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    roll_call.call_by_port(note, address, timeout)
    raise SystemExit(0)


def check_not_reached(world):
    raise AssertionError("the start should have been refused")
