"""Results as JSON files, with the command, machine, versions and date that made them."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
_PACKAGES = ("isoshard", "jax", "jaxlib", "torch", "numpy")


def save(name: str, results: dict[str, Any]) -> Path:
    """Write results with all that is needed to repeat them to `benchmarks/results/NAME.json`."""
    RESULTS.mkdir(exist_ok=True)
    return write(RESULTS / f"{name}.json", {**circumstances(), "results": results}, indent=1)


def saved(name: str) -> dict[str, Any]:
    """The results written before; empty if there are none."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text())["results"] if path.exists() else {}


def write(path: Path, content: Any, *, indent: int = 0) -> Path:
    """Write a JSON file that can be read, and merged, line by line."""
    path.write_text(json.dumps(content, indent=indent) + "\n")
    return path


def write_rows(path: Path, content: Mapping[str, Any], *, levels: int) -> Path:
    """Write a JSON file with one line for each row of its tables.

    Args:
        path: of the file.
        content: dicts within dicts.
        levels: how many of these, from the outside, are written over several lines.
    """
    path.write_text(_rows(content, levels) + "\n")
    return path


def _rows(content: Any, levels: int) -> str:
    if not levels or not content or not isinstance(content, Mapping):
        return json.dumps(content)
    lines = [f"{json.dumps(name)}: {_rows(inner, levels - 1)}" for name, inner in content.items()]
    return "{\n" + ",\n".join(lines) + "\n}"


def circumstances() -> dict[str, Any]:
    """Machine, versions, command and date."""
    return {
        "command": command(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "system": f"{platform.system()} {platform.machine()}",
            "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        },
        "versions": versions(_PACKAGES),
    }


def command(arguments: Sequence[str] | None = None) -> str:
    """The command that runs this process, as it is typed today.

    Args:
        arguments: of the command; None for those of the process.
    """
    words = sys.argv[1:] if arguments is None else arguments
    return f"{program()} {shlex.join(words)}".strip()


def program() -> str:
    """The command without arguments."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return f"python -m {spec.name.removesuffix('.__main__') if spec is not None else 'benchmarks'}"


def versions(packages: Iterable[str]) -> dict[str, str]:
    """The versions of Python and of some packages."""
    results = {package: importlib.metadata.version(package) for package in packages}
    return {"python": platform.python_version(), **results}


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor())
