"""What programs can be compiled for here, and what each compiler is to be told of a machine."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.sharding import Mesh

from isoshard.core.runtime.nvidia import install_cuda
from isoshard.planner.machine.described_devices import DescribedDevice
from isoshard.planner.machine.topologies import Topology

from .gpu_configs import target_config
from .planning_errors import CompilerMissingError, PlanningError

PYTHON = "ISOSHARD_COMPILER_PYTHON"
"""Environment variable: another interpreter, which has jax and the compilers."""

HOST_DEVICES = 2048
"""How many virtual devices XLA's client for CPUs has at most in one process."""

_PACKAGES = {
    "host": (),
    "tpu": ("libtpu",),
    "cuda": ("jax-cuda12-plugin", "jax-cuda13-plugin"),
}
_EXPORT = "flatbuffers"
"""What `jax.export` writes programs with; jax itself does not require it."""
_TITLES = {"host": "partition (this host)", "tpu": "compile for TPU", "cuda": "compile for GPU"}


@dataclasses.dataclass(frozen=True)
class CompileTarget:
    """A machine as its compiler takes it.

    Attributes:
        machine: "host", "tpu" or "cuda".
        topology: libtpu's name of one slice; for GPUs slices x hosts x devices.
        slices: how many of them.
        target_config: of GPUs, what they are.
        places: of each device of the mesh, in order, its slice and place; or its number.
        flags: for XLA.
        keep: which module of those that XLA dumps is read instead of the last one; a pattern.
    """

    machine: str
    topology: str = ""
    slices: int = 1
    target_config: str = ""
    places: tuple[tuple[int, ...], ...] = ()
    flags: tuple[str, ...] = ()
    keep: str = ""


@dataclasses.dataclass(frozen=True)
class Planned:
    """Whether a kind of machine can be planned for here.

    Attributes:
        machine: "host", "tpu" or "cuda".
        title: what can be done.
        versions: of the compiler's packages; empty if there is none.
        problem: why it cannot be used; "" if it can.
        fix: the line that installs it; "" if it is installed.
    """

    machine: str
    title: str
    versions: Mapping[str, str]
    problem: str
    fix: str


def compiler_python(given: str | None = None) -> str:
    """The interpreter that compiles: the one given, that of the environment variable, this one.

    Args:
        given: a path.
    """
    return given or os.environ.get(PYTHON) or sys.executable


def planned(python: str | None = None) -> list[Planned]:
    """What can be planned here, for `isoshard doctor`.

    Args:
        python: the interpreter that compiles.
    """
    return [_planned(machine, compiler_python(python)) for machine in _PACKAGES]


def check(machine: str, python: str | None = None) -> Mapping[str, str]:
    """Make sure that a machine's compiler is there.

    Args:
        machine: "host", "tpu" or "cuda".
        python: the interpreter that compiles.

    Returns:
        The versions of jax, jaxlib and the compiler's packages.

    Raises:
        CompilerMissingError: it is not, or does not fit jax; the message has the line to install.
    """
    python = compiler_python(python)
    found = _judged(machine, packages_of(python))
    if found.problem and machine == "host":
        raise CompilerMissingError(
            f"this host partitions by jax, and {found.problem} in {python}: {found.fix}, or set "
            f"{PYTHON} to the python of an environment that has it. depth='trace' does without"
        )
    if found.problem:
        raise CompilerMissingError(
            f"depth='compile' for this machine needs its compiler, and {found.problem} in "
            f"{python}: {found.fix}. No accelerator is needed. An environment of "
            f"its own does as well: set {PYTHON} to its python. depth='partition' needs neither"
        )
    return found.versions


def target_of(mesh: Mesh, machine: Topology) -> CompileTarget:
    """What the target's compiler is told of a mesh over a described machine.

    Args:
        mesh: of the step.
        machine: that it is over.

    Example:
        >>> from isoshard.planner.machine.topologies import topology
        >>> machine = topology("v5e:2*4x4")
        >>> target = target_of(machine.mesh((2, 16), ("replica", "data")), machine)
        >>> target.machine, target.topology, target.slices, target.places[16]
        ('tpu', 'v5e:4x4', 2, (1, 0, 0, 0))

    Raises:
        PlanningError: the mesh takes no whole block of a machine of TPUs.
    """
    platform = machine.chip.platform
    if platform == "cpu":
        return CompileTarget("host")
    described = isinstance(mesh.devices.flat[0], DescribedDevice)
    if platform == "tpu":
        return _tpu(mesh, machine, described)
    # A compiler takes a program for all devices of its topology, so a mesh of fewer is given a
    # machine of its size.
    per_host = min(machine.per_host, mesh.size)
    hosts = -(-mesh.size // per_host)
    places = tuple((number,) for number in range(mesh.size))
    config = target_config(machine.chip.name)
    return CompileTarget("cuda", f"1x{hosts}x{per_host}", 1, config, places)


def _tpu(mesh: Mesh, machine: Topology, described: bool) -> CompileTarget:
    """The slices and the block of the grid that a mesh is over."""
    if not described:
        grid = "x".join(map(str, machine.shape))
        return CompileTarget("tpu", f"{machine.chip.name}:{grid}", machine.slices)
    places = np.array([(d.slice_index, *d.coords) for d in mesh.devices.flat])
    slices, numbers = np.unique(places[:, 0], return_inverse=True)
    first = places[:, 1:].min(axis=0)
    block = places[:, 1:].max(axis=0) - first + 1
    if len(slices) * math.prod(block.tolist()) != mesh.size:
        raise PlanningError(
            f"a mesh of {mesh.size} devices takes no whole block of {machine.name}, and libtpu "
            "compiles for whole blocks: take a mesh of all its devices, or a smaller machine"
        )
    moved = np.column_stack([numbers, places[:, 1:] - first])
    grid = "x".join(map(str, block.tolist()[: len(machine.shape)]))
    name = f"{machine.chip.name}:{grid}"
    return CompileTarget("tpu", name, len(slices), "", tuple(map(tuple, moved.tolist())))


def _planned(machine: str, python: str) -> Planned:
    try:
        installed = packages_of(python)
    except CompilerMissingError as error:
        return Planned(machine, _TITLES[machine], {}, str(error), f"unset {PYTHON}")
    return _judged(machine, installed)


def _judged(machine: str, installed: Mapping[str, str]) -> Planned:
    """Whether the packages of an interpreter do."""
    names = _PACKAGES[machine]
    versions = {name: installed[name] for name in ("jax", "jaxlib") if installed.get(name)}
    compilers = {name: installed[name] for name in names if installed.get(name)}
    problem, fix = "", ""
    if not versions.get("jax"):
        problem, fix = "jax is not installed", "pip install jax"
    elif names and not compilers:
        problem = f"{' or '.join(names)} is not installed"
    else:
        problem = _misfit(machine, versions["jax"], compilers)
    if problem and not fix:
        fix = install_cuda(versions["jax"]) if machine == "cuda" else "pip install libtpu"
    if not problem and not installed.get(_EXPORT):
        problem, fix = f"{_EXPORT} is not installed", f"pip install {_EXPORT}"
    return Planned(machine, _TITLES[machine], versions | compilers, problem, fix)


def _misfit(machine: str, jax: str, compilers: Mapping[str, str]) -> str:
    """What is wrong with the versions; CUDA's plugin has to be of jax's version."""
    if machine != "cuda":
        return ""
    wrong = {name: one for name, one in compilers.items() if _release(one) != _release(jax)}
    if len(wrong) < len(compilers):
        return ""
    said = ", ".join(f"{name} {version}" for name, version in wrong.items())
    return f"{said} does not fit jax {jax}"


def _release(version: str) -> str:
    found = re.match(r"\d+(\.\d+)*", version)
    return found[0] if found else version


def packages_of(python: str) -> dict[str, str]:
    """Versions of jax and the compilers in an interpreter now; "" of what is not installed.

    Args:
        python: its path.

    Raises:
        CompilerMissingError: it is none.
    """
    names = [
        "jax",
        "jaxlib",
        _EXPORT,
        *(name for several in _PACKAGES.values() for name in several),
    ]
    if python == sys.executable:
        return {name: _version(name) for name in names}
    asked = (
        "import importlib.metadata as m, json, sys\n"
        "def v(n):\n"
        "    try: return m.version(n)\n"
        "    except m.PackageNotFoundError: return ''\n"
        "print(json.dumps({n: v(n) for n in sys.argv[1:]}))"
    )
    try:
        found = subprocess.run(
            [python, "-c", asked, *names], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise CompilerMissingError(
            f"{python} does not run as a Python interpreter ({error}). What compiles is the one "
            f"that {PYTHON} names, else this one: set it to one that has jax, or unset it"
        ) from error
    answer: dict[str, Any] = json.loads(found.stdout)
    return {name: str(version) for name, version in answer.items()}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
