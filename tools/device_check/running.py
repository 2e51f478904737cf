"""Runs the parts of sections, each in its own process, and assembles their results.

The results of a run are one JSON document:

    {"ok": bool, "command", "date", "device": {..}, "versions": {..}, "seconds", "limit",
     "sections": {name: {"status", "seconds", "failures": [..], "summary", "parts": {name: part}}}}

where a part is `{"status", "seconds", "results"}`, and "error" (type, message and last frames) if
it did not end properly. A status is "ok", "failed" or "not run". A section is "ok" if all its
required parts are and it has no failures; the document is "ok" if all its sections are.
"""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tools.harness import calls
from tools.harness.xla_flags import without_mlir

from .part import read
from .sections import Section

MIN_SECONDS = 15
"""A part is not started with less time left: importing JAX and torch takes half of it."""

PARALLEL = 2
"""Parts that run at the same time, except those of a timed section on a GPU."""

# JAX by default takes three quarters of a GPU's memory when it starts, and torch needs some too.
VARIABLES = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "2"}
# On the CPU only the check itself is tested, and most of its time would go into compilations.
CPU_VARIABLES = {
    "JAX_PLATFORMS": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
}

Document = dict[str, Any]
Record = dict[str, Any]


@dataclasses.dataclass
class Options:
    """Options of every part.

    Attributes:
        device: "gpu" or "cpu".
        kind: of the device, as JAX reports it.
        entries: number of entries of the operator database.
        jobs: number of processes that share them.
    """

    device: str
    kind: str = ""
    entries: int = 300
    jobs: int = 1


def run(
    sections: Sequence[Section],
    options: Options,
    *,
    limit: float,
    log: Callable[[str], None] = lambda line: None,
    clock: Callable[[], float] = time.monotonic,
    call: Callable[..., Any] = calls.call,
) -> dict[str, Record]:
    """Run sections in order.

    Args:
        sections: to run.
        options: of every part.
        limit: seconds for all sections.
        log: receives a line when a part starts.
        clock: returns seconds.
        call: runs a function in a new process, as `tools.harness.calls.call`.

    Returns:
        A record of each section.
    """
    ends = clock() + limit
    parts: dict[str, dict[str, Record]] = {}

    def start(section: Section, name: str) -> Record:
        section_limit = section.limits[options.device]
        seconds = min(section_limit, ends - clock())
        if seconds < min(MIN_SECONDS, section_limit):
            return {"status": "not run", "seconds": 0, "results": {}}
        log(f"{section.name}: {name}" if name != section.name else name)
        more = section.more_options(options.device, parts)
        part_options = {**dataclasses.asdict(options), **more, "seconds": seconds}
        return run_part(section, name, part_options, call=call)

    for timed, group in itertools.groupby(sections, lambda section: section.timed):
        with ThreadPoolExecutor(1 if timed and options.device == "gpu" else PARALLEL) as pool:
            futures = {
                (section.name, name): pool.submit(start, section, name)
                for section in group
                for name in section.parts
            }
        for (section, name), future in futures.items():
            parts.setdefault(section, {})[name] = future.result()
    return {section.name: section_record(section, parts[section.name]) for section in sections}


def run_part(
    section: Section,
    part: str,
    options: Mapping[str, Any],
    *,
    call: Callable[..., Any] = calls.call,
) -> Record:
    """Run one part.

    Args:
        section: of the part.
        part: its name.
        options: of the part; "seconds" is its time limit.
        call: as in `run`.

    Returns:
        Its record.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "part.json"
        try:
            outcome = call(
                "tools.device_check.part:run",
                *(section.name, part, options, str(path)),
                variables=_variables(section, options["device"]),
                limit=options["seconds"],
            )
        except calls.Failed as error:  # it crashed, or reached its time limit
            failure = {"type": "Failed", "message": str(error), "frames": []}
            outcome = {"results": read(path), "error": failure}
    status = "failed" if "error" in outcome else "ok"
    return {"status": status, "seconds": time.monotonic() - started, **outcome}


def _variables(section: Section, device: str) -> dict[str, str]:
    """The environment variables of a section's parts."""
    if device == "gpu":
        return {**VARIABLES, **section.variables}
    flags = [section.variables.get("XLA_FLAGS", ""), without_mlir(version("jax"))]
    return {**VARIABLES, **CPU_VARIABLES, **section.variables, "XLA_FLAGS": " ".join(flags).strip()}


def section_record(section: Section, parts: Mapping[str, Record]) -> Record:
    """Assemble the record of a section.

    Args:
        section: its description.
        parts: the records of its parts.
    """
    required = {name: part for name, part in parts.items() if name not in section.optional}
    not_run = [name for name, part in parts.items() if part["status"] == "not run"]
    failures = [
        f"{name}: {part['error']['type']}: {part['error']['message']}"
        for name, part in required.items()
        if "error" in part
    ]
    results = {name: part["results"] for name, part in parts.items()}
    complete = not any(name in not_run for name in required)
    if complete:
        failures += section.failures(results)
    summary = section.summary(results) if any(results.values()) else ""
    if not_run:
        summary = f"not run, no time left: {', '.join(not_run)}. {summary}".rstrip()
    return {
        "status": "failed" if failures else "ok" if complete else "not run",
        "seconds": sum(part["seconds"] for part in parts.values()),
        "failures": failures,
        "summary": summary,
        "parts": dict(parts),
    }
