"""`isoshard doctor --cluster`: the ranks of a run, what they see of each other, what is wrong.

Started as a script is, by torchrun, srun or mpirun, in every rank. Rank 0 prints, all end with its
status. Whatever does not come has a limit, and is named.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import jax
from rich.console import Console

import isoshard as iso
from isoshard.core.errors import DistributedError
from isoshard.core.processes import coordination
from isoshard.core.processes.handshake import CANNOT_RUN, env_report, split_address
from isoshard.core.processes.launchers import Launch, coordinator, launch_from

from .cluster_facts import free_ports, interfaces, rates
from .cluster_links import Door, Link, Listener, call, distances, local_address
from .cluster_tables import show

APART = 1.0
"""Seconds that clocks may differ."""


def examine(options: argparse.Namespace) -> int:
    """Look at this run from this rank.

    Args:
        options: of `isoshard doctor`: `timeout` in seconds for each step, `json`.

    Returns:
        0 if the ranks can run together, else 1; the same in all ranks that can hear it.
    """
    stage = ["starting"]
    with _limited(4 * options.timeout + 30, stage):
        return _examine(options, stage)


def _examine(options: argparse.Namespace, stage: list[str]) -> int:
    launch = None
    try:
        launch = launch_from(os.environ)
        address = coordinator(launch, options.timeout) if launch else None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", iso.errors.ClusterWarning)
            each = 1 if launch and launch.local_rank is not None else None
            started = iso.distributed.init_distributed(timeout=options.timeout, local_devices=each)
    except DistributedError as error:
        if not (launch and launch.rank and str(error).startswith(CANNOT_RUN)):
            print(f"isoshard doctor --cluster: {error}", file=sys.stderr, flush=True)
        return 1
    launch = launch or Launch(started.launcher or "", started.rank, started.size)
    facts = _facts(
        launch, address, [str(warning.message) for warning in caught], options.timeout, stage
    )
    stage[0] = "hearing of the others"
    return _report(launch, address, facts, options)


def wrong(facts: list[dict[str, Any]]) -> list[str]:
    """What is wrong between the ranks, in words.

    Args:
        facts: of each rank, as `examine` gathers them.
    """
    errors = [
        f"rank {fact['note']['rank']}: {message}" for fact in facts for message in fact["faults"]
    ]
    hosts = {fact["note"]["rank"]: fact["note"]["host"] for fact in facts}
    links = [Link(**link) for fact in facts for link in fact["links"]]
    for link in links:
        way = f"rank {link.start} ({hosts[link.start]}) to rank {link.end} ({hosts[link.end]})"
        if link.fault:
            errors.append(
                f"no connection from {way}: {link.fault}. Open {facts[0]['free_ports']} between "
                "the machines, or choose another interface: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME"
            )
        elif link.start == 0 and abs(link.ahead) > APART + link.round_trip:
            errors.append(
                f"the clock of rank {link.end} ({hosts[link.end]}) is {abs(link.ahead):.1f} s "
                f"{'ahead of' if link.ahead > 0 else 'behind'} rank 0's: start chrony or ntpd"
            )
    return list(dict.fromkeys(errors))


def _facts(
    launch: Launch, address: str | None, warning_texts: list[str], limit: float, stage: list[str]
) -> dict[str, Any]:
    """The facts and measurements of this rank."""
    host = split_address(address)[0] if address else "127.0.0.1"
    facts: dict[str, Any] = {
        "note": dataclasses.asdict(env_report(launch)),
        "address": local_address(host),
        "interfaces": interfaces(),
        "free_ports": free_ports(),
        "devices": f"{jax.local_device_count()} x {jax.local_devices()[0].device_kind}",
        "chosen": {
            name: os.environ[name]
            for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
            if name in os.environ
        },
        "faults": warning_texts,
        "links": [],
        "rates": {},
    }
    if launch.size > 1:
        stage[0] = "calling the other ranks"
        listener = Listener(facts["address"] or host, limit)
        coordination.put(
            f"doctor/door/{launch.rank}", json.dumps(dataclasses.asdict(listener.door))
        )
        for distance in distances(launch.size):
            other = (launch.rank + distance) % launch.size
            stage[0] = f"calling rank {other}"
            facts["links"].append(dataclasses.asdict(_link(launch.rank, other, limit)))
    stage[0] = "measuring between devices (a collective: does every rank take part?)"
    facts["rates"] = rates()
    return facts


def _link(rank: int, other: int, limit: float) -> Link:
    message = coordination.get(f"doctor/door/{other}", limit)
    if message is None:
        return Link(rank, other, fault=f"it did not publish its address within {limit:g} s")
    return call(rank, other, Door(**json.loads(message)), limit)


def _report(
    launch: Launch, address: str | None, local_facts: dict[str, Any], options: argparse.Namespace
) -> int:
    """Bring all to rank 0, which prints; every rank returns its status."""
    if launch.rank:
        coordination.put(f"doctor/facts/{launch.rank}", json.dumps(local_facts))
        return 0 if coordination.get("doctor/verdict", 2 * options.timeout) == "well" else 1
    facts, missing = [local_facts], []
    end = time.monotonic() + options.timeout
    for rank in range(1, launch.size):
        message = coordination.get(f"doctor/facts/{rank}", max(0.0, end - time.monotonic()))
        facts.append(json.loads(message)) if message else missing.append(rank)
    errors = [f"rank {rank} did not report within {options.timeout:g} s" for rank in missing]
    report = {
        "healthy": not (errors := errors + wrong(facts)),
        "launcher": launch.launcher or None,
        "size": launch.size,
        "coordinator": address,
        "ranks": facts,
        "wrong": errors,
    }
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        show(Console(), report)
    if launch.size > 1:
        coordination.put("doctor/verdict", "ill" if errors else "well")
    return 1 if errors else 0


@contextlib.contextmanager
def _limited(seconds: float, stage: list[str]) -> Iterator[None]:
    """End the process, with what it waited for, should any wait have no end."""

    def end() -> None:
        message = f"isoshard doctor --cluster: not done after {seconds:g} s, while {stage[0]}\n"
        os.write(2, message.encode())
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
