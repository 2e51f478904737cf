"""The Python samples of README.md, each as a separate program.

As written they simulate eight CPU devices, also on a machine with a GPU. On a GPU they run a second
time, on the GPU: without the line that simulates devices, as its comment says, and with a mesh of
one device.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from tests.doc_blocks import blocks
from tools.harness.results import ROOT

NAMES = ("jax", "torch", "both")
"""Of the samples, in the order of README.md."""

_SIMULATE, _MESH = "iso.simulate_devices(8)", "iso.make_mesh((2, 4)"
_PRINT_PLATFORM = "\nimport jax\nprint('platform:', jax.default_backend())\n"


class Program(NamedTuple):
    """A sample, and the platform that it is expected to run on."""

    code: str
    platform: str


def run(part: str, options: Mapping[str, Any], save: Callable[..., None]) -> None:
    """Run the samples in parallel.

    Args:
        part: the section's only part.
        options: of the check; "device" is "cpu" or "gpu".
        save: receives for each program "ok", "platform", "seconds" and "output".
    """
    selected = programs(options["device"])
    results = {}
    with ThreadPoolExecutor(min(len(selected), os.cpu_count() or 1)) as pool:
        for name, result in zip(selected, pool.map(run_program, selected.values()), strict=True):
            results[name] = result
            save(samples=results)


def programs(device: str) -> dict[str, Program]:
    """The programs to run, by name.

    On the CPU this is one sample on one device, to test the check itself; tests/test_readme.py runs
    all samples as written.

    Args:
        device: "cpu" or "gpu".
    """
    samples = dict(zip(NAMES, blocks((ROOT / "README.md").read_text()), strict=True))
    if device == "cpu":
        return {"both, cpu": Program(on_single_device(samples["both"].code), "cpu")}
    return {
        **{f"{name}, gpu": Program(on_single_device(s.code), "gpu") for name, s in samples.items()},
        **{f"{name}, as written": Program(s.code, "cpu") for name, s in samples.items()},
    }


def on_single_device(code: str) -> str:
    """Change a sample to run on one device, without simulated ones.

    Args:
        code: the sample as written.

    Raises:
        ValueError: the sample has another way to make its devices or mesh.
    """
    if code.count(_SIMULATE) != 1 or code.count(_MESH) != 1:
        raise ValueError(
            f"expected one {_SIMULATE} and one {_MESH} in each sample of README.md; adapt "
            "tools/device_check/samples.py to the new samples"
        )
    lines = [line for line in code.splitlines() if _SIMULATE not in line]
    return "\n".join(lines).replace(_MESH, "iso.make_mesh((1, 1)")


def run_program(program: Program) -> dict[str, Any]:
    """Run one program in a new process.

    Args:
        program: to run.

    Returns:
        "ok" if it succeeded, printed something and ran on the expected platform; "platform",
        "seconds" and the end of its "output".
    """
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sample.py"
        path.write_text(program.code + _PRINT_PLATFORM)
        process = subprocess.run(
            [sys.executable, path.name], cwd=folder, capture_output=True, text=True
        )
    *output, last = process.stdout.splitlines() or [""]
    platform = last.removeprefix("platform: ")
    succeeded = process.returncode == 0
    return {
        "ok": succeeded and platform == program.platform and any(output),
        "platform": platform,
        "seconds": time.perf_counter() - started,
        "output": (process.stdout if succeeded else process.stderr)[-1000:],
    }
