"""The targets of `make aot`, as their compilers are told of them: eight chips of each kind."""

from __future__ import annotations

from typing import NamedTuple

from isoshard.planner.machine.topologies import topology
from isoshard.planner.programs.targets import CompileTarget, target_of

SHAPE, AXES = (2, 4), ("data", "model")


class Target(NamedTuple):
    """What is compiled for.

    Attributes:
        name: as in the tables.
        platform: as `jax.export` calls it.
        machine: as `iso.planner.topology` takes it.
    """

    name: str
    platform: str
    machine: str

    def described(self) -> CompileTarget:
        """The machine as its compiler takes it."""
        machine = topology(self.machine)
        return target_of(machine.mesh(SHAPE, AXES), machine)


TARGETS = {
    "v5e": Target("v5e", "tpu", "v5e:2x4"),
    "h100": Target("h100", "cuda", "h100:1x8"),
}
