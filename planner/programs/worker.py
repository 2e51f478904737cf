"""The process that compiles an exported step: `python worker.py FOLDER`.

It imports JAX, NumPy and the standard library only, so another interpreter that has a compiler and
no isoshard can run the file. It reads `request.json` (see `targets.CompileTarget`) and
`program.bin` in FOLDER, writes `program.hlo` and `result.json` there, and errors to standard error.
Its standard input is a pipe of its parent: when that closes, the process ends itself with its
children.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

_QUIET = {
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
    "CUDA_VISIBLE_DEVICES": "-1",
}
"""Lets libtpu and CUDA's plugin compile on a machine without an accelerator."""

_PACKAGES = {
    "host": (),
    "tpu": ("libtpu",),
    "cuda": ("jax-cuda12-plugin", "jax-cuda13-plugin"),
}

_MEMORY = (
    *("generated_code_size_in_bytes", "argument_size_in_bytes", "output_size_in_bytes"),
    *("alias_size_in_bytes", "temp_size_in_bytes", "peak_memory_in_bytes"),
    *("host_generated_code_size_in_bytes", "host_argument_size_in_bytes"),
    *("host_output_size_in_bytes", "host_alias_size_in_bytes", "host_temp_size_in_bytes"),
)


def main(folder: Path) -> None:
    """Compile the program of a folder."""
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    request = json.loads((folder / "request.json").read_text())
    os.environ.update(_QUIET)
    flags = [*request["flags"], os.environ.get("XLA_FLAGS", "")]
    dumped = folder / "dump"
    if request["keep"]:
        flags += [f"--xla_dump_to={dumped}", "--xla_dump_hlo_as_text"]
    os.environ["XLA_FLAGS"] = " ".join(flags)
    began = time.monotonic()
    compiled = _compiled(folder, request, dumped)
    compiled["seconds"] = time.monotonic() - began
    (folder / "result.json").write_text(json.dumps(compiled))


def _end_with_parent(folder: Path) -> None:
    """Wait for the end of standard input; then end this process and its children."""
    while os.read(0, 1):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _compiled(folder: Path, request: dict[str, Any], dumped: Path) -> dict[str, Any]:
    import jax  # the environment has to be set first
    import numpy as np
    from jax import export
    from jax.sharding import AxisType, Mesh

    jax.config.update("jax_enable_x64", request["wide"])
    sizes = [size for _, size in request["axes"]]
    devices = _devices(jax, request, int(np.prod(sizes)))
    names = tuple(name for name, _ in request["axes"])
    types = tuple(AxisType[name] for name in request["axis_types"])
    mesh = Mesh(np.array(devices, object).reshape(sizes), names, axis_types=types)
    program = export.deserialize(bytearray((folder / "program.bin").read_bytes()))
    arguments = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=layout)
        for aval, layout in zip(program.in_avals, program.in_shardings_jax(mesh), strict=True)
    ]
    function = jax.jit(
        program.call,
        donate_argnums=tuple(request["donated"]),
        out_shardings=tuple(program.out_shardings_jax(mesh)),
        keep_unused=True,
    )
    lowered = function.lower(*arguments)
    result: dict[str, Any] = {"memory": {}, "cost": {}, "failure": ""}
    try:
        compiled = lowered.compile()
        text = compiled.as_text() or ""
        stats = compiled.memory_analysis()
        result["memory"] = {name: int(getattr(stats, name, 0)) for name in _MEMORY}
        costs: Any = compiled.cost_analysis() or {}
        costs = costs[0] if isinstance(costs, list) else costs
        result["cost"] = {name: float(value) for name, value in costs.items()}
    except jax.errors.JaxRuntimeError as error:
        text = _last_dumped(dumped, request["keep"])
        if not text:
            raise
        result["failure"] = str(error)[:2000]
    text = _last_dumped(dumped, request["keep"]) or text
    (folder / "program.hlo").write_text(text)
    packages = ("jax", "jaxlib", *_PACKAGES[request["machine"]])
    result["versions"] = {name: _version(name) for name in packages if _version(name)}
    return result


def _last_dumped(folder: Path, pattern: str) -> str:
    """The largest of the dumped modules that a pattern names; "" if there is none."""
    paths = list(folder.glob(pattern)) if pattern else []
    return max(paths, key=lambda path: path.stat().st_size).read_text() if paths else ""


def _devices(jax: Any, request: dict[str, Any], count: int) -> list[Any]:
    """The devices of the requested machine, by slice and coordinates."""
    if request["machine"] == "host":
        jax.config.update("jax_num_cpu_devices", count)
        return jax.devices()
    from jax.experimental import topologies

    if request["machine"] == "tpu":
        several = {"num_slices": request["slices"]} if request["slices"] > 1 else {}
        machine = topologies.get_topology_desc(
            topology_name=request["topology"], platform="tpu", **several
        )
        devices = {(getattr(d, "slice_index", 0) or 0, *d.coords): d for d in machine.devices}
    else:
        machine = topologies.get_topology_desc(
            topology_name="gpu",
            platform="cuda",
            target_config=request["target_config"],
            topology=request["topology"],
        )
        devices = {(device.id,): device for device in machine.devices}
    if request["device_coords"]:
        return [devices[tuple(index)] for index in request["device_coords"]]
    return [devices[index] for index in sorted(devices)[:count]]


def _version(name: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


if __name__ == "__main__":
    main(Path(sys.argv[1]))
