"""`isoshard doctor --cluster` in every rank; TEST_KIND says what is wrong with one of them."""

import dataclasses
import os

from isoshard.cli import cluster_links, main
from isoshard.core.processes import handshake


def start():
    kind, rank = os.environ.get("TEST_KIND", ""), os.environ.get("RANK")
    if kind == "version" and rank == "1":
        found = handshake._version
        handshake._version = lambda name: "0.0.7" if name == "jax" else found(name)
    if kind == "odd" and rank == "1":
        now = cluster_links._now
        cluster_links._now = lambda: now() + 3600
    if kind == "odd" and rank == "2":
        _say_another_port()
    raise SystemExit(main(["doctor", "--cluster", *os.environ["TEST_ARGS"].split()]))


def _say_another_port():
    begin = cluster_links.Listener.__init__

    def begin_elsewhere(self, host, limit):
        begin(self, host, limit)
        self.door = dataclasses.replace(self.door, port=int(os.environ["TEST_CLOSED"]))

    cluster_links.Listener.__init__ = begin_elsewhere


def check_not_reached(world):
    raise AssertionError("the command should have ended")
