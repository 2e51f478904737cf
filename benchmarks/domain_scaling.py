"""What domain operators send, from 2 to 512 devices: by compiler and on paper.

Each operator is compiled for so many virtual devices, forward and backward, on even and on uneven
blocks, and the bytes that the busiest device receives are read off the program. Weak scaling: 4
rows per device. Strong scaling, of operators whose messages grow with the block: 2,048 rows in all.
Nothing is run, so the machine does not matter. A program that sends something else than its formula
says is an error, unless the reason stands with the operator (`benchmarks.scaling.operators`).

    python -m benchmarks.domain_scaling            # results/domain_scaling.json, docs/scaling.svg
    python -m benchmarks.domain_scaling --quick    # up to 16 devices, nothing written
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.table import Table

import isoshard as iso
from benchmarks.scaling.cases import WAYS, Case, Size, programs
from benchmarks.scaling.counting import received
from benchmarks.scaling.figure import draw
from benchmarks.scaling.operators import CASES
from tools.harness import calls, tables
from tools.harness.command import Benchmark

ROOT = Path(__file__).parent.parent
FIGURE = ROOT / "docs" / "scaling.svg"
WEAK = 4  # rows per device
STRONG = 2048  # rows in all
EVERY = (2, 4, 8, 32, 128, 512)
QUICK = (2, 4, 16)


def main() -> None:
    """Compile, compare, and write what was found."""
    benchmark = Benchmark("domain_scaling", __doc__, quick=1)
    quick = benchmark.parse().quick
    lines: list[dict[str, Any]] = []
    for devices in QUICK if quick else EVERY:
        tables.show(f"compiling for {devices} devices ..")
        lines += calls.call("benchmarks.domain_scaling:measured_alone", devices)
    check(lines)
    results = grouped(lines)
    if not quick:
        FIGURE.write_text(draw(results))
    benchmark.finish(results, table(lines))


def measured_alone(devices: int) -> list[dict[str, Any]]:
    """What a process of its own finds, which has so many virtual devices."""
    jax.config.update("jax_disable_most_optimizations", True)  # LLVM's, not the partitioner
    iso.simulate_devices(devices)
    return measured_here(devices)


def sizes(case: Case, devices: int) -> Iterable[tuple[Size, str]]:
    """The sizes on which a case is tried, each with what it scales: "weak" or "strong"."""
    for split in case.splits:
        if split == "uneven" and devices > case.most:
            continue
        yield Size(devices, WEAK, split), "weak"
        if case.grows:
            yield Size(devices, STRONG // devices, split), "strong"


def measured_here(devices: int, cases: Sequence[Case] = CASES) -> list[dict[str, Any]]:
    """Compile cases for virtual devices of this process.

    Args:
        devices: how many; there may be more.
        cases: what to compile.

    Returns:
        For each size: name, split, scaling, devices, rows per device, and bytes forward and
        backward, compiled and on paper.
    """
    lines, totals = [], {}
    for case in cases:
        for size, scaling in sizes(case, devices):
            key = case.name, size
            totals[key] = totals.get(key) or measured(case, size)
            line = {"name": case.name, "split": size.split, "scaling": scaling}
            lines.append(line | {"devices": devices, "rows": size.rows} | totals[key])
    return lines


def measured(case: Case, size: Size) -> dict[str, float]:
    """Bytes of the device that receives the most, compiled and on paper.

    "backward" is what the program of the gradients receives on top of the forward pass.
    """
    forward, both = (received(text, size.devices) for text in programs(case, size))
    return {
        "forward": float(forward.max()),
        "forward_paper": case.forward(size),
        "backward": float((both - forward).max()),
        "backward_paper": case.backward(size),
    }


def check(lines: Sequence[dict[str, Any]], cases: Sequence[Case] = CASES) -> None:
    """Compare with the formulas.

    Args:
        lines: as `measured_here` gives them.
        cases: which they are of.

    Raises:
        RuntimeError: a program sends something else, and no reason is given; or a reason is given,
            and none sends anything else. All of them in one message.
    """
    by_name = {case.name: case for case in cases}
    messages, used = [], set()
    for line in lines:
        case = by_name[line["name"]]
        for way in WAYS:
            have, want = line[way], line[f"{way}_paper"]
            if abs(have - want) <= 1e-6 * max(have, want):
                continue
            used.add((case.name, line["split"], way))
            if (line["split"], way) not in case.differs:
                messages.append(
                    f"{case.name}, {line['split']}, {way}, {line['devices']} devices of "
                    f"{line['rows']} rows: {have:.0f} bytes, {want:.0f} on paper"
                )
    messages += [
        f"{case.name}, {split}, {way}: as on paper, and a reason is given why not"
        for case in cases
        for split, way in case.differs
        if (case.name, split, way) not in used
    ]
    if messages:
        raise RuntimeError("programs and formulas differ:\n" + "\n".join(messages))


def grouped(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Results by name, split and scaling: lists over the numbers of devices."""
    results: dict[str, Any] = {}
    for line in lines:
        of = results.setdefault(line["name"], {}).setdefault(line["split"], {})
        group = of.setdefault(line["scaling"], {})
        for key in ("devices", "forward", "forward_paper", "backward", "backward_paper"):
            group.setdefault(key, []).append(line[key])
    return results


def table(lines: Sequence[dict[str, Any]]) -> Table:
    """Show bytes for the fewest and for the most devices."""
    least, most = (end(line["devices"] for line in lines) for end in (min, max))
    ends = {(*_key(line), line["devices"]): line for line in lines}
    rows = []
    for line in lines:
        if line["devices"] == least:
            pair = [ends[(*_key(line), devices)] for devices in (least, most)]
            cells = {f"{way} {n}": _bytes(pair[n], way) for way in WAYS for n in (0, 1)}
            rows.append((_key(line), cells))
    columns = {f"{way}, {(least, most)[n]}": f"{{{way} {n}}}" for way in WAYS for n in (0, 1)}
    title = "bytes that the busiest device receives; * is not what the formula says"
    return tables.table(title, columns, rows, ("", "split", "scaling"))


def _key(line: dict[str, Any]) -> tuple[str, str, str]:
    return line["name"], line["split"], line["scaling"]


def _bytes(line: dict[str, Any], way: str) -> str:
    have, want = line[way], line[f"{way}_paper"]
    return f"{have:,.0f}{'*' * (abs(have - want) > 1e-6 * max(have, want))}"


if __name__ == "__main__":
    main()
