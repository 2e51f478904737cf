"""The tables of `isoshard doctor --cluster`."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import rich.box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from isoshard.core.processes.handshake import MUST_MATCH

from .cluster_links import Link

_MANY = 16


def show(console: Console, report: Mapping[str, Any]) -> None:
    """Print a report.

    Args:
        console: where to.
        report: as `--json` prints it.
    """
    ranks: Sequence[dict[str, Any]] = report["ranks"]
    console.print(_launch_table(report))
    console.print(_ranks_table(ranks))
    links = [Link(**link) for rank in ranks for link in rank["links"]]
    if links:
        console.print(_links_table(links, report["size"]))
    console.print(_rates_table(ranks))
    for message in report["wrong"]:
        console.print(Text(f"✗ {message}", "red"), soft_wrap=True)
    if report["healthy"]:
        several = f"The {report['size']} ranks can run together."
        alone = "This process runs alone, and can; started by a launcher, its ranks are shown."
        console.print(Text(several if report["size"] > 1 else alone, "green"))


def _launch_table(report: Mapping[str, Any]) -> Table:
    first = report["ranks"][0]
    table = Table("", "", title="Launch", box=rich.box.SIMPLE, show_header=False)
    table.add_row("started by", report["launcher"] or "nobody: a run of one")
    table.add_row("ranks", str(report["size"]))
    table.add_row("coordinator", report["coordinator"] or "none")
    table.add_row("between ranks", first["free_ports"])
    faces = [f"{name} {address}" for name, address in first["interfaces"].items() if address]
    table.add_row("interfaces of rank 0", ", ".join(faces))
    chosen = [f"{name}={value}" for name, value in first["chosen"].items()]
    table.add_row("chosen", ", ".join(chosen) or "the system's: no GLOO_ or NCCL_SOCKET_IFNAME")
    return table


def _ranks_table(ranks: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="Ranks", box=rich.box.SIMPLE)
    for column in ("rank", "host", "address", "devices", *MUST_MATCH, "python", "clock"):
        table.add_column(column)
    ahead = {link["end"]: link["ahead"] for link in ranks[0]["links"] if not link["fault"]}
    for rank in ranks[:_MANY]:
        note = rank["note"]
        versions = [note["versions"].get(name) or "-" for name in (*MUST_MATCH, "python")]
        off = ahead.get(note["rank"])
        clock = "" if off is None else f"{1e3 * off:+.1f} ms"
        table.add_row(
            str(note["rank"]), note["host"], rank["address"], rank["devices"], *versions, clock
        )
    if len(ranks) > _MANY:
        table.add_row("..", f"{len(ranks) - _MANY} more: --json")
    return table


def _links_table(links: Iterable[Link], size: int) -> Table:
    """A row for each distance between ranks: all its pairs, and the slowest of them."""
    table = Table(title="Between ranks, all at once", box=rich.box.SIMPLE)
    for column in ("from rank to", "reached", "round trip", "MB/s", "slowest"):
        table.add_column(column)
    steps: dict[int, list[Link]] = {}
    for link in links:
        steps.setdefault((link.end - link.start) % size, []).append(link)
    for step, those in sorted(steps.items()):
        measured = [link for link in those if not link.fault]
        row = [f"+{step}", f"{len(measured)} of {len(those)}", "", "", ""]
        if measured:
            slowest = min(measured, key=lambda link: link.rate)
            row[2] = f"{1e3 * statistics.median(link.round_trip for link in measured):.2f} ms"
            row[3] = f"{statistics.median(link.rate for link in measured) / 1e6:.0f}"
            row[4] = f"{slowest.start} to {slowest.end}: {slowest.rate / 1e6:.0f}"
        table.add_row(*row)
    return table


def _rates_table(ranks: Sequence[dict[str, Any]]) -> Table:
    table = Table("", "MB/s", "slowest", title="Devices", box=rich.box.SIMPLE)
    for name in ranks[0]["rates"]:
        measured = [
            (rank["rates"][name], rank["note"]["rank"]) for rank in ranks if name in rank["rates"]
        ]
        rate, rank = min(measured)
        middle = statistics.median(rate for rate, _ in measured)
        table.add_row(name, f"{middle / 1e6:.0f}", f"rank {rank}: {rate / 1e6:.0f}")
    return table
