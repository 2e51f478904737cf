"""Virtual environments of the tested versions, shared by all checkouts of a machine.

An environment holds everything but isoshard, which the tests take from an unpacked wheel of the
checkout. It is named after its constraints, so other constraints make another environment.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from .pairs import LATEST, ROOT, pair

WHEEL = ROOT / "build" / "versions"
"""Where isoshard's wheel is unpacked."""

FEW = "torch,flax,checkpoint,onnx-torch,models,demo"
"""Extras of isoshard for the tests of the bridges, with `_TESTS`; all tests need `EVERYTHING`."""

EVERYTHING = "dev"

_VISION = ("timm", "torchvision", "vit-pytorch")
"""With `EVERYTHING`, in the environment's folder `vision`: Makefile tells why."""

_TESTS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "expecttest", "chex", "equinox")
_TESTS += ("safetensors", "onnxruntime")
_BUILD = ("pip", "setuptools>=77", "wheel")


class NoPython(LookupError):
    """This machine has no Python of the version."""


def folder(name: str) -> Path:
    """Where the environment of a pair is.

    Args:
        name: of the pair.
    """
    versions = pair(name)
    kept = versions.constraints.read_bytes() if versions.constraints else b""
    digest = hashlib.sha256(kept + repr((versions, FEW, _TESTS)).encode()).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    root = Path(os.environ.get("ISOSHARD_ENVIRONMENTS") or cache / "isoshard" / "environments")
    return root / f"{name}-{digest[:12]}"


def python_of(name: str, extras: str = FEW) -> Path:
    """The interpreter of a pair's environment, which is made if it is not there.

    Args:
        name: of the pair.
        extras: of isoshard that it has to have; more are installed into what is there.

    Raises:
        NoPython: there is no such Python to make it with.
        subprocess.CalledProcessError: pip could not install a package, and printed why.
    """
    versions, path = pair(name), folder(name)
    python = path / "bin" / "python"
    complete = path / f"complete-{extras}"
    if complete.exists() and name != LATEST:
        return python
    begun = time.perf_counter()
    packages = ", ".join(versions.requirements)
    print(f"{path}: Python {versions.python}, {packages}, [{extras}] ..", flush=True)
    if not python.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([interpreter(versions.python), "-m", "venv", path], check=True)
    how = ["--upgrade"]
    how += ["--constraint", str(versions.constraints)] if versions.constraints else []
    pip(python, *how, *_BUILD)  # here, since an earlier try may have ended before it
    pip(python, *how, *versions.requirements, *_TESTS, f"isoshard[{extras}] @ {ROOT.as_uri()}")
    if extras == EVERYTHING:
        pip(python, *how, "--no-deps", "--target", str(path / "vision"), *_VISION)
    subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", "isoshard"], check=True)
    complete.touch()
    print(f"installed in {time.perf_counter() - begun:.0f} s", flush=True)
    return python


def pip(python: Path, *arguments: str) -> None:
    """Install packages.

    Args:
        python: of the environment.
        *arguments: of `pip install`.
    """
    command = (python, "-m", "pip", "--disable-pip-version-check", "install")
    subprocess.run([*command, "--quiet", "--no-compile", *arguments], check=True)


def resolved(name: str) -> list[str]:
    """What pip would install with a pair today, nothing being installed.

    Args:
        name: of the pair.

    Returns:
        Requirements such as "numpy==2.5.5", by name.
    """
    extras = FEW if name == "oldest" else EVERYTHING  # not all libraries have such old releases
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run([interpreter(pair(name).python), "-m", "venv", scratch], check=True)
        python, report = Path(scratch) / "bin" / "python", Path(scratch) / "report.json"
        pip(python, "--upgrade", "pip")
        dry = ("--dry-run", "--ignore-installed", "--report", str(report))
        ours = f"isoshard[{extras}] @ {ROOT.as_uri()}"
        vision = _VISION if extras == EVERYTHING else ()
        pip(python, *dry, *pair(name).requirements, *_TESTS, *_BUILD, *vision, ours)
        installs = json.loads(report.read_text())["install"]
    named = {package["metadata"]["name"]: package["metadata"]["version"] for package in installs}
    return [
        f"{package}=={version}"
        for package, version in sorted(named.items(), key=lambda item: item[0].lower())
        if package not in ("isoshard", "pip")
    ]


@functools.cache
def interpreter(version: str) -> Path:
    """A Python of a version: on PATH, of pyenv, or what `PYTHON314` and its like name.

    Args:
        version: such as "3.14".

    Raises:
        NoPython: none of these is there.
    """
    name = f"python{version}"
    variable = f"PYTHON{version.replace('.', '')}"
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    candidates = [os.environ.get(variable), shutil.which(name)]
    candidates += sorted(map(str, pyenv.glob(f"{version}.*/bin/{name}")), reverse=True)
    for path in filter(None, candidates):
        if _version(path) == version:
            return Path(path)
    raise NoPython(
        f"there is no Python {version} here, on PATH or of pyenv; install one (Debian: apt install "
        f"{name} {name}-venv), or name it: {variable}=/path/to/{name}"
    )


def _version(python: str) -> str:
    code = "import sys; print(*sys.version_info[:2], sep='.')"
    try:
        answer = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=30)
    except OSError:
        return ""
    return answer.stdout.strip()


@functools.cache
def unpacked_wheel(python: Path) -> Path:
    """Build isoshard's wheel from this checkout, and unpack it.

    Args:
        python: with setuptools.

    Returns:
        The folder, to be put on PYTHONPATH.
    """
    shutil.rmtree(WHEEL, ignore_errors=True)
    # setuptools' own folder: what an earlier build left there would end up in the wheel.
    shutil.rmtree(ROOT / "build" / "lib", ignore_errors=True)
    pip(python, "--no-deps", "--no-build-isolation", "--target", str(WHEEL), str(ROOT))
    return WHEEL


def run(
    name: str, arguments: Sequence[str], extras: str = FEW, output: IO[str] | None = None
) -> int:
    """Run Python of a pair's environment with isoshard's wheel, on the CPU.

    Args:
        name: of the pair.
        arguments: for Python.
        extras: as for `python_of`.
        output: the file for what it prints; None for this process's own.

    Returns:
        The exit status.
    """
    python = python_of(name, extras)
    cpu = {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
    wheel = unpacked_wheel(python)  # its bin has the command isoshard
    path = {"PYTHONPATH": str(wheel), "PATH": f"{wheel / 'bin'}:{os.environ['PATH']}"}
    environ = {**os.environ, **cpu, **path}
    command = [python, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environ, stdout=output, stderr=output).returncode
