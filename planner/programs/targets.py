"""The targets of compilation, their compilers' options, and errors.

GPUs are described by XLA's `GpuTargetConfigProto`, as text. Sources: NVIDIA's data sheets and
tuning guides of each architecture (multiprocessors, caches, bandwidth, clock),
https://docs.nvidia.com/cuda/ampere-tuning-guide, .../hopper-tuning-guide,
.../blackwell-tuning-guide; limits by compute capability from the CUDA C++ programming guide.
"""

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

from isoshard.core.kit import CodedError, ShardingError, install_cuda
from isoshard.planner.machine.topologies import DescribedDevice, Topology


class PlanningError(CodedError, RuntimeError, code="ISO040"):
    """A step could not be planned at the requested depth; the message says how to fix it."""


class CompilerMissingError(PlanningError, code="ISO041"):
    """The target's compiler is not installed; the message has the line that installs it."""


class CompilationError(PlanningError, code="ISO042"):
    """The target's compiler failed; the message ends with its error."""


class CompilationTimeoutError(PlanningError, TimeoutError, code="ISO043"):
    """The compiler exceeded the timeout; its process has been ended."""


@dataclasses.dataclass(frozen=True)
class GpuFacts:
    """The properties of a GPU that XLA compiles for.

    Attributes:
        name: of the device, as CUDA reports it.
        capability: CUDA's compute capability.
        cores: multiprocessors.
        memory: bytes.
        bandwidth: bytes a second.
        cache: bytes of the second-level cache.
        clock: in GHz.
        shared: bytes of shared memory of one multiprocessor.
        block_shared: bytes of it that one block may use.
    """

    name: str
    capability: tuple[int, int]
    cores: int
    memory: int
    bandwidth: float
    cache: int
    clock: float
    shared: int = 228 * 1024
    block_shared: int = 227 * 1024


_MIB = 1024 * 1024
GPUS = {
    "a100": GpuFacts(
        "NVIDIA A100-SXM4-80GB", (8, 0), 108, 80 * 10**9, 2.039e12, 40 * _MIB, 1.41,
        164 * 1024, 163 * 1024,
    ),
    "h100": GpuFacts("NVIDIA H100 80GB HBM3", (9, 0), 132, 80 * 10**9, 3.35e12, 50 * _MIB, 1.98),
    "h200": GpuFacts("NVIDIA H200", (9, 0), 132, 141 * 10**9, 4.8e12, 50 * _MIB, 1.98),
    "b200": GpuFacts("NVIDIA B200", (10, 0), 148, 180 * 10**9, 8e12, 126 * _MIB, 1.965),
    "gb200": GpuFacts("NVIDIA GB200", (10, 0), 152, 186 * 10**9, 8e12, 126 * _MIB, 2.062),
}  # fmt: skip
"""By the name of the chip in a topology."""


def target_config(chip: str) -> str:
    """The `GpuTargetConfigProto` of a chip, as text.

    Raises:
        ShardingError: the chip is not in `GPUS`.

    Example:
        >>> target_config("h100").splitlines()[1].strip()
        'threads_per_block_limit: 1024'
    """
    if chip not in GPUS:
        raise ShardingError(
            f"compiling for {chip!r} is not supported, only for {', '.join(sorted(GPUS))}. "
            "Estimate with depth='trace' or 'partition'"
        )
    gpu = GPUS[chip]
    major, minor = gpu.capability
    fields = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 48 * 1024,
        "shared_memory_per_core": gpu.shared,
        "threads_per_core_limit": 2048,
        "core_count": gpu.cores,
        "fpus_per_core": 64 if gpu.capability == (8, 0) else 128,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "memory_bandwidth": int(gpu.bandwidth),
        "l2_cache_size": gpu.cache,
        "clock_rate_ghz": gpu.clock,
        "device_memory_size": gpu.memory,
        "shared_memory_per_block_optin": gpu.block_shared,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
    }
    rows = "\n".join(f"  {name}: {value}" for name, value in fields.items())
    return (
        f"gpu_device_info {{\n{rows}\n"
        f"  cuda_compute_capability {{ major: {major} minor: {minor} }}\n}}\n"
        'platform_name: "CUDA"\n'
        "dnn_version_info { major: 9 minor: 8 }\n"
        "runtime_version { major: 12 minor: 9 }\n"
        f'device_description_str: "{gpu.name}"\n'
    )


PYTHON = "ISOSHARD_COMPILER_PYTHON"
"""Environment variable: another interpreter, which has jax and the compilers."""

HOST_DEVICES = 2048
"""The most virtual devices of XLA's client for CPUs in one process."""

_PACKAGES = {
    "host": (),
    "tpu": ("libtpu",),
    "cuda": ("jax-cuda12-plugin", "jax-cuda13-plugin"),
}
_EXPORT = "flatbuffers"
"""The package that `jax.export` serializes with; jax itself does not require it."""
_TITLES = {"host": "partition (this host)", "tpu": "compile for TPU", "cuda": "compile for GPU"}


@dataclasses.dataclass(frozen=True)
class CompileTarget:
    """A machine in the form its compiler takes.

    Attributes:
        machine: "host", "tpu" or "cuda".
        topology: libtpu's name of one slice; for GPUs slices x hosts x devices.
        slices: how many of them.
        target_config: of GPUs; see `target_config`.
        device_coords: of each device of the mesh, in order, its slice and coordinates, or its id.
        flags: for XLA.
        keep: a pattern of the dumped module to read, instead of the last one.
    """

    machine: str
    topology: str = ""
    slices: int = 1
    target_config: str = ""
    device_coords: tuple[tuple[int, ...], ...] = ()
    flags: tuple[str, ...] = ()
    keep: str = ""


@dataclasses.dataclass(frozen=True)
class Planned:
    """Whether a kind of machine can be planned for here.

    Attributes:
        machine: "host", "tpu" or "cuda".
        title: for tables.
        versions: of the compiler's packages; empty without a compiler.
        problem: why it cannot be used; "" if it can.
        fix: the line that installs it; "" if it is installed.
    """

    machine: str
    title: str
    versions: Mapping[str, str]
    problem: str
    fix: str


def compiler_python(arguments: str | None = None) -> str:
    """The interpreter that compiles: the argument, the environment variable's, or this one."""
    return arguments or os.environ.get(PYTHON) or sys.executable


def planned(python: str | None = None) -> list[Planned]:
    """The kinds of machines that can be planned for here, for `isoshard doctor`."""
    return [_planned(machine, compiler_python(python)) for machine in _PACKAGES]


def check(machine: str, python: str | None = None) -> Mapping[str, str]:
    """Check that a machine's compiler is installed.

    Raises:
        CompilerMissingError: it is not, or does not match jax; the message has the line to install.
    """
    python = compiler_python(python)
    judged = _judged(machine, packages_of(python))
    if judged.problem and machine == "host":
        raise CompilerMissingError(
            f"partitioning on this host needs jax, and {judged.problem} in {python}: {judged.fix}, "
            f"or set {PYTHON} to the python of an environment that has it. depth='trace' needs none"
        )
    if judged.problem:
        raise CompilerMissingError(
            f"depth='compile' for this machine needs its compiler, and {judged.problem} in "
            f"{python}: {judged.fix}. No accelerator is needed. An environment of "
            f"its own does as well: set {PYTHON} to its python. depth='partition' needs neither"
        )
    return judged.versions


def target_of(mesh: Mesh, machine: Topology) -> CompileTarget:
    """The compiler's description of a mesh over a described machine.

    Example:
        >>> from isoshard.planner.machine.topologies import topology
        >>> machine = topology("v5e:2*4x4")
        >>> target = target_of(machine.mesh((2, 16), ("replica", "data")), machine)
        >>> target.machine, target.topology, target.slices, target.device_coords[16]
        ('tpu', 'v5e:4x4', 2, (1, 0, 0, 0))

    Raises:
        PlanningError: the mesh is not a full block of a machine of TPUs.
    """
    platform = machine.chip.platform
    if platform == "cpu":
        return CompileTarget("host")
    described = isinstance(mesh.devices.flat[0], DescribedDevice)
    if platform == "tpu":
        return _tpu(mesh, machine, described)
    # A compiler takes a program for all devices of its topology, so a smaller mesh gets a machine
    # of its own size.
    per_host = min(machine.per_host, mesh.size)
    hosts = -(-mesh.size // per_host)
    groups = tuple((index,) for index in range(mesh.size))
    config = target_config(machine.chip.name)
    return CompileTarget("cuda", f"1x{hosts}x{per_host}", 1, config, groups)


def _tpu(mesh: Mesh, machine: Topology, described: bool) -> CompileTarget:
    """The slices and the block of the grid of a mesh."""
    if not described:
        grid = "x".join(map(str, machine.shape))
        return CompileTarget("tpu", f"{machine.chip.name}:{grid}", machine.slices)
    positions = np.array([(d.slice_index, *d.coords) for d in mesh.devices.flat])
    slices, indices = np.unique(positions[:, 0], return_inverse=True)
    first = positions[:, 1:].min(axis=0)
    block = positions[:, 1:].max(axis=0) - first + 1
    if len(slices) * math.prod(block.tolist()) != mesh.size:
        raise PlanningError(
            f"a mesh of {mesh.size} devices is not a full block of {machine.name}, and libtpu "
            "compiles only for full blocks: use a mesh of all its devices, or a smaller machine"
        )
    moved = np.column_stack([indices, positions[:, 1:] - first])
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
    """Whether the packages of an interpreter can compile for a machine."""
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
    """A mismatch of versions; CUDA's plugin must have jax's version."""
    if machine != "cuda":
        return ""
    wrong = {
        name: compiler
        for name, compiler in compilers.items()
        if _release(compiler) != _release(jax)
    }
    if len(wrong) < len(compilers):
        return ""
    versions = ", ".join(f"{name} {version}" for name, version in wrong.items())
    return f"{versions} does not fit jax {jax}"


def _release(version: str) -> str:
    match = re.match(r"\d+(\.\d+)*", version)
    return match[0] if match else version


def packages_of(python: str) -> dict[str, str]:
    """Versions of jax and the compilers in an interpreter now; "" of what is not installed.

    Raises:
        CompilerMissingError: `python` is not an interpreter.
    """
    names = [
        "jax",
        "jaxlib",
        _EXPORT,
        *(name for several in _PACKAGES.values() for name in several),
    ]
    if python == sys.executable:
        return {name: _version(name) for name in names}
    program = (
        "import importlib.metadata as m, json, sys\n"
        "def v(n):\n"
        "    try: return m.version(n)\n"
        "    except m.PackageNotFoundError: return ''\n"
        "print(json.dumps({n: v(n) for n in sys.argv[1:]}))"
    )
    try:
        run = subprocess.run(
            [python, "-c", program, *names],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise CompilerMissingError(
            f"{python} does not run as a Python interpreter ({error}): set {PYTHON} to an "
            "interpreter that has jax, or unset it"
        ) from error
    packages: dict[str, Any] = json.loads(run.stdout)
    return {name: str(version) for name, version in packages.items()}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
