"""The memory of a step that really runs on virtual devices of this CPU, for `planning_depths`.

    python -m benchmarks.planning_running NUMBER

Runs case NUMBER of `planning_depths.CASES` and prints JSON. The measure is what the kernel says of
this process (`/proc/self/status`): resident memory before any argument exists, and the most
resident memory from then to the end of the third step (`VmHWM`, which is set back to what is
resident first). The difference, over the number of devices, is a device's peak: arguments, results,
and temporaries that were touched. The compiler's statistics are no part of it. What the compiler
left behind is returned to the kernel before (`malloc_trim`), and every large block is a mapping of
its own (`MALLOC_MMAP_THRESHOLD_`), so that none is taken from what was resident already.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

STEPS = 3
_SET_BACK = "5"
"""Written to `/proc/self/clear_refs` it sets the high-water mark of resident memory back."""


def measured(number: int) -> dict[str, Any]:
    """Run a case in a process of its own.

    Args:
        number: of the case.

    Returns:
        "peak": bytes of one device; "arguments": bytes of all arguments of one device, measured.
    """
    variables = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1", "JAX_PLATFORMS": "cpu"}
    process = subprocess.run(
        [sys.executable, "-m", "benchmarks.planning_running", str(number)],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        raise RuntimeError(f"case {number} did not run:\n{process.stderr[-2000:]}")
    return json.loads(process.stdout.splitlines()[-1])


def _run(number: int) -> dict[str, Any]:
    import jax  # the number of devices has to be set before it starts
    from jax.extend.core import jaxpr_as_fun

    from benchmarks import planning_depths

    case = planning_depths.CASES[number]
    count = int(case.machine.partition(":")[2])
    jax.config.update("jax_num_cpu_devices", count)
    devices = jax.devices()
    step = planning_depths.sharded_step(case)
    mesh = jax.make_mesh(
        tuple(step.mesh.axis_sizes), step.mesh.axis_names, step.mesh.axis_types, devices=devices
    )
    step = planning_depths.sharded_step(case, mesh)
    replaced = [result.replaces for result in step.results]
    run = (
        jax.jit(
            lambda *inputs: tuple(jaxpr_as_fun(step.program)(*inputs)),
            in_shardings=tuple(input_.sharding for input_ in step.inputs),
            out_shardings=tuple(result.sharding for result in step.results),
            donate_argnums=tuple(sorted(at for at in replaced if at is not None)),
            keep_unused=True,
        )
        .lower(*(jax.ShapeDtypeStruct(input_.shape, input_.dtype) for input_ in step.inputs))
        .compile()
    )
    make = (
        jax.jit(
            lambda: tuple(jax.numpy.ones(input_.shape, input_.dtype) for input_ in step.inputs),
            out_shardings=tuple(input_.sharding for input_ in step.inputs),
        )
        .lower()
        .compile()
    )
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text(_SET_BACK)
    before = _resident("VmRSS")
    inputs = list(jax.block_until_ready(make()))
    resident = _resident("VmRSS") - before
    results: list[Any] = []
    for _ in range(STEPS):
        results = list(jax.block_until_ready(run(*inputs)))
        for at, source in enumerate(replaced):
            if source is not None:
                inputs[source] = results[at]
        del results[:]
    most = _resident("VmHWM") - before
    return {"peak": most // count, "arguments": resident // count, "steps": STEPS}


def _resident(name: str) -> int:
    match = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if match is None:
        raise RuntimeError(f"this kernel does not say {name} of a process")
    return int(match[1]) * 1024


if __name__ == "__main__":
    print(json.dumps(_run(int(sys.argv[1]))))
