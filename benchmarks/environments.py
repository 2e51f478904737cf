"""Python environments that are made by request only: the peers' and other compilers.

    python -m benchmarks.environments torchax torch-xla     (make bench-peers)
    python -m benchmarks.environments torch-xla --test      (make test-torch-xla)
    python -m benchmarks.environments aot                   (make aot)

Each lies beside `.venv` as `.venv-NAME`. They are large where they need a torch of which the
registry has only the CUDA build, so nothing makes them unasked.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Tests(NamedTuple):
    """One run of pytest.

    Attributes:
        arguments: for pytest.
        variables: of the process.
        inside: with the environment's interpreter; else with the one that runs this.
    """

    arguments: Sequence[str]
    variables: Mapping[str, str] = {}
    inside: bool = True


class Environment(NamedTuple):
    """What to install.

    Attributes:
        about: one line for `--help`.
        packages: with their requirements.
        alone: without theirs, installed after `packages`.
        ours: isoshard too, from this checkout.
        tests: what `--test` runs, one after the other.
    """

    about: str
    packages: Sequence[str]
    alone: Sequence[str] = ()
    ours: bool = False
    tests: Sequence[Tests] = ()


def torch_xla_devices(count: int) -> dict[str, str]:
    """The variables by which torch_xla is given virtual CPU devices."""
    return {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(count)}


_WITH_TORCH_XLA = "tests/with_torch_xla"

ENVIRONMENTS = {
    "torchax": Environment(
        "torchax's nightly, the only build that imports with torch 2.13; 1.5 GB",
        ("torch==2.13.0", "jax==0.10.2", "optax==0.2.8"),
        alone=("torchax==0.0.14.dev20261026",),
    ),
    "torch-xla": Environment(
        "torch_xla's last release with its torch; 7 GB",
        (
            *("torch==2.9.0", "torch_xla==2.9.0", "numpy==2.4.6", "jax==0.10.2", "jaxlib==0.10.2"),
            *("rich", "pytest", "pytest-timeout", "setuptools>=77", "wheel"),
        ),
        ours=True,
        tests=(
            Tests((f"{_WITH_TORCH_XLA}/single",), torch_xla_devices(1)),
            Tests((f"{_WITH_TORCH_XLA}/spmd",), torch_xla_devices(8)),
            Tests((f"{_WITH_TORCH_XLA}/test_scripts.py",), inside=False),
        ),
    ),
    "aot": Environment(
        "the compilers for TPU and CUDA, which need no accelerator; 6 GB",
        (
            "jax[cuda12]==0.10.2",
            "jaxlib==0.10.2",
            "libtpu==0.0.52",
            "numpy==2.4.6",
            "flatbuffers==25.12.19",
        ),
    ),
}


def folder(name: str) -> Path:
    """Where an environment lies."""
    return ROOT / f".venv-{name}"


def python_of(name: str) -> Path:
    """The interpreter of an environment."""
    return folder(name) / "bin" / "python"


def make(name: str) -> None:
    """Make or complete an environment.

    Raises:
        subprocess.CalledProcessError: pip could not install a package, and said why.
    """
    environment = ENVIRONMENTS[name]
    packages = ", ".join((*environment.packages, *environment.alone))
    print(f"installing {packages} into {folder(name).name} ..")
    if not python_of(name).exists():
        venv.create(folder(name), with_pip=True)
    _pip(name, *environment.packages)
    if environment.alone:
        _pip(name, "--pre", "--no-deps", *environment.alone)
    if environment.ours:
        _pip(name, "--no-deps", "--no-build-isolation", "--editable", str(ROOT))


def versions(name: str) -> str:
    """The versions of torch and jax in an environment."""
    program = (
        "from importlib.metadata import version; "
        "print('torch', version('torch'), 'jax', version('jax'))"
    )
    return subprocess.run(
        [python_of(name), "-c", program], check=True, capture_output=True, text=True
    ).stdout.strip()


def test(name: str, arguments: Sequence[str]) -> int:
    """Run an environment's tests; returns the exit status of the first run of pytest that fails."""
    print(versions(name), flush=True)
    for tests in ENVIRONMENTS[name].tests:
        python = python_of(name) if tests.inside else sys.executable
        command = [python, "-m", "pytest", "-p", "no:cacheprovider", *tests.arguments, *arguments]
        variables = {**os.environ, **tests.variables}
        if status := subprocess.run(command, cwd=ROOT, env=variables, check=False).returncode:
            return status
    return 0


def _pip(name: str, *arguments: str) -> None:
    pip = (python_of(name), "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    subprocess.run([*pip, *arguments], check=True)


def main() -> None:
    """Make what the command line names."""
    lines = [f"  {name}: {about.about}" for name, about in ENVIRONMENTS.items()]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.environments",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(["environments:", *lines]),
    )
    parser.add_argument("names", nargs="+", choices=list(ENVIRONMENTS), metavar="NAME")
    parser.add_argument("--test", action="store_true", help="run what tests there are for it")
    options, arguments = parser.parse_known_args()
    if options.test and (without := [n for n in options.names if not ENVIRONMENTS[n].tests]):
        parser.error(f"--test, and there are no tests for {', '.join(without)}")
    for name in options.names:
        make(name)
        if options.test and (status := test(name, arguments)):
            sys.exit(status)


if __name__ == "__main__":
    main()
