"""The command: `python -m tools.device_check`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tools.harness.results import ROOT, command

from . import running
from .sections import SECTIONS, Section

LIMIT = 480
ENTRIES = {"gpu": 300, "cpu": 8}
JOBS = {"gpu": 12, "cpu": 1}
"""Processes for the operator database; on a GPU each needs half a gigabyte of its memory."""

ENVIRONMENT = Section("environment", {"gpu": 120, "cpu": 120}, lambda _: [], lambda _: "")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: of the command line; those of this process by default.

    Returns:
        0 if all selected sections are "ok", else 1.
    """
    options = parse(arguments)
    with tempfile.TemporaryDirectory() as folder:
        if options.wheels is not None:
            install(options.wheels, Path(folder))
        from . import report  # its tables need rich, which may be one of the wheels

        if options.write_docs is not None:
            try:
                print("wrote", *report.write_docs(options.write_docs))
            except (OSError, ValueError, LookupError) as error:
                print(error, file=sys.stderr)
                return 1
            return 0
        document = check(options)
        report.show(document)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(document, indent=1) + "\n")
    print(f"wrote {options.out}")
    return 0 if document["ok"] else 1


def check(options: argparse.Namespace) -> running.Document:
    """Run the selected sections.

    Args:
        options: of the command line.

    Returns:
        The document that `running` describes.

    Raises:
        SystemExit: JAX or torch does not start, or JAX has another device than the selected one.
    """
    started = time.monotonic()
    limit = ENVIRONMENT.limits["gpu"]
    preset = running.Options(options.device or "gpu")
    environment = running.run_part(
        ENVIRONMENT, ENVIRONMENT.name, {**vars(preset), "seconds": limit}
    )
    results = environment["results"]
    if "error" in environment:
        raise SystemExit(
            f"JAX and torch do not start: {environment['error']['message']}\n"
            f"Versions: {results.get('versions')}. docs/benchmarks.md, 'On a GPU', lists what to "
            "install"
        )
    device = "cpu" if results["platform"] == "cpu" else "gpu"
    if options.device not in (None, device):
        raise SystemExit(
            f"--device {options.device}: JAX's device is {results['kind']} "
            f"({results['platform']}). Install JAX for the GPU, pip install "
            '"jax[cuda13]", or pass --device cpu'
        )
    jobs = options.jobs or min(JOBS[device], len(os.sched_getaffinity(0)))
    entries = options.entries or ENTRIES[device]
    records = running.run(
        [SECTIONS[name] for name in SECTIONS if name in options.only],
        running.Options(device, results["kind"], entries, jobs),
        limit=options.limit - (time.monotonic() - started),
        log=lambda line: print(line, flush=True),
    )
    return {
        "ok": all(record["status"] == "ok" for record in records.values()),
        "command": command(options.arguments),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "device": {name: value for name, value in results.items() if name != "versions"},
        "versions": results["versions"],
        "seconds": time.monotonic() - started,
        "limit": options.limit,
        "sections": records,
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line.

    Args:
        arguments: those of this process by default.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tools.device_check", description="Check isoshard on an accelerator."
    )
    parser.add_argument("--device", choices=("cpu", "gpu"), help="default: gpu if JAX has one")
    parser.add_argument("--only", help=f"sections, of {','.join(SECTIONS)}; default: all")
    parser.add_argument("--limit", type=float, default=LIMIT, help=f"seconds in all ({LIMIT})")
    parser.add_argument("--entries", type=int, help="of the operator database (gpu 300, cpu 8)")
    parser.add_argument("--jobs", type=int, help="processes for these (gpu 12, cpu 1)")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install for this run")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "device_check.json")
    parser.add_argument("--write-docs", type=Path, metavar="FILE", help="write figures into docs")
    options = parser.parse_args(arguments)
    options.arguments = sys.argv[1:] if arguments is None else arguments
    options.only = options.only.split(",") if options.only else list(SECTIONS)
    if unknown := set(options.only) - set(SECTIONS):
        parser.error(f"unknown sections {sorted(unknown)}; the sections are {', '.join(SECTIONS)}")
    return options


def install(wheels: Path, folder: Path) -> None:
    """Install wheels, without a network, for this process and those that it starts.

    Args:
        wheels: folder of the wheels.
        folder: to install into.

    Raises:
        SystemExit: the folder has no wheel, or pip fails.
    """
    files = sorted(map(str, wheels.glob("*.whl")))
    if not files:
        raise SystemExit(
            f"--wheels {wheels}: the folder has no wheel; docs/benchmarks.md lists them"
        )
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    if subprocess.run([*pip, "--target", str(folder), *files]).returncode:
        raise SystemExit(f"--wheels {wheels}: pip failed, see above")
    sys.path.insert(0, str(folder))
    paths = [str(folder), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))


if __name__ == "__main__":
    sys.exit(main())
