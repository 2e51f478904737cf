"""Compile exported programs for a target, one after the other: run by the compiler's interpreter.

    python tests/aot/compiling.py TARGET.json < requests > answers

It imports JAX, the planner's worker and the standard library only. TARGET.json holds a
`CompileTarget` and how many devices there are. For each line of JSON that comes in
(`Artifact.request`), one goes out: what became of the program, and how long it took. A program that
kills the compiler ends the process, and whoever reads knows at which one.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT / "core" / "planner" / "programs")  # not this folder: it would hide packages


def main() -> None:
    """Set the target up, then compile what comes in."""
    import worker  # of the planner

    target = json.loads(Path(sys.argv[1]).read_text())
    os.environ.update(worker._QUIET)
    import jax

    devices = worker._devices(jax, target, target["devices"])
    print(json.dumps({"ready": True, "versions": _versions(worker)}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        started = time.perf_counter()
        try:
            compile_one(jax, request, devices)
            answer = {"status": "pass"}
        except Exception as error:
            text = " ".join(str(error).split())
            answer = {"status": "refused", "reason": f"{type(error).__name__}: {text[:300]}"}
        answer["seconds"] = round(time.perf_counter() - started, 3)
        print(json.dumps(answer), flush=True)


def compile_one(jax: Any, request: dict[str, Any], devices: list[Any]) -> None:
    """Compile one program.

    Args:
        jax: the package.
        request: see `Artifact.request`.
        devices: of the target.
    """
    import numpy as np
    from jax import export
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    sizes = [size for _, size in request["axes"]]
    some = np.array(devices[: int(np.prod(sizes))], object).reshape(sizes)
    mesh = Mesh(some, tuple(name for name, _ in request["axes"]))
    whole = NamedSharding(mesh, PartitionSpec())
    jax.config.update("jax_enable_x64", request["wide"])
    program = export.deserialize(bytearray(Path(request["path"]).read_bytes()))
    alone = program.nr_devices == 1
    flat = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=whole if alone else layout or whole)
        for aval, layout in zip(program.in_avals, program.in_shardings_jax(mesh), strict=True)
    ]
    args, kwargs = jax.tree.unflatten(program.in_tree, flat)
    donated = tuple(request["donated"])
    jax.jit(program.call, donate_argnums=donated, keep_unused=True).lower(*args, **kwargs).compile()


def _versions(worker: Any) -> dict[str, str]:
    packages = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "nvidia-cuda-nvcc-cu12")
    return {name: worker._version(name) for name in packages if worker._version(name)}


if __name__ == "__main__":
    main()
