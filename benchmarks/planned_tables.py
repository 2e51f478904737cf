"""The tables of `benchmarks.planned_steps`: on the terminal, and of docs/planning.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tools.harness import tables

_FRAMEWORKS = {"torch": "torch", "flax": "NNX"}
_TIMES = ("trace_ms", "partition_ms", "step_ms")
_SUMMARY = {
    'rank correlation, "trace"': "{spearman[trace]:.2f}",
    '"partition"': "{spearman[partition]:.2f}",
    "found / best by hand": "{found / best by hand:.2f} ({best by hand}{ratios})",
    "one plan twice": "{again:.3f}{twice}",
    "losses differ by, at most": "{apart:.0e}",
    "collectives not as predicted": "{other}",
}


def shown(name: str, facts: Mapping[str, Any]) -> list[Any]:
    """What `measure` found, as a table and lines.

    Args:
        name: of the model and the framework.
        facts: it.
    """
    columns = {
        "predicted, trace": "{trace_ms:.0f} ms",
        "partition": "{partition_ms:.0f} ms",
        "measured": "{step_ms:.0f} ms",
        "median": "{median_ms:.0f} ms",
        "fastest": "{best_ms:.0f} ms",
        "processes": "{processes}",
        "collectives": "{collectives}",
        "sent": "{sent_mib:.1f} MiB",
        "not as said": "{differ}",
        "losses apart": "{apart:.1e}",
    }
    rows = {
        plan: {**row, "processes": _between(row["processes_ms"], "{:.0f}")}
        for plan, row in facts["rows"].items()
    }
    lines: list[Any] = [tables.by_name(name, columns, rows)]
    lines += [f"Spearman of {depth}: {rank:.3f}" for depth, rank in facts["spearman"].items()]
    ratio = facts["found / best by hand"]
    lines += [f"found / best by hand ({facts['best by hand']}): {ratio:.3f}"]
    return [*lines, f"one plan twice: {facts['again']:.3f}"]


def markdown(results: Mapping[str, Mapping[str, Any]]) -> str:
    """A table of milliseconds for each model, and one of what they come to.

    Args:
        results: what `measure` gave, by model and framework.
    """
    models = dict.fromkeys(workload.rpartition("-")[0] for workload in results)
    rows = [[workload, *tables.cells(_SUMMARY, _summed(results[workload]))] for workload in results]
    summary = tables.markdown(["six hand plans and the found one", *_SUMMARY], rows)
    return "\n\n".join([*(_milliseconds(name, results) for name in models), summary])


def _milliseconds(name: str, results: Mapping[str, Mapping[str, Any]]) -> str:
    cells = {
        word: results[of]["rows"]
        for framework, word in _FRAMEWORKS.items()
        if (of := f"{name}-{framework}") in results
    }
    first = next(iter(cells.values()))
    titles = [title for word in cells for title in (f'{word}: "trace"', '"partition"', "measured")]
    rows = [
        [plan, *(cell for rows in cells.values() for cell in _cells(rows[plan]))]
        for plan in sorted(first, key=lambda plan: first[plan]["step_ms"])
    ]
    return tables.markdown([f"{name}, ms a step", *titles], rows)


def _cells(row: Mapping[str, Any]) -> list[str]:
    """Milliseconds that are told and measured, and between which processes were."""
    spread = _between(row.get("processes_ms", ()), "{:.0f}")
    *predicted, measured = (f"{row[key]:.0f}" for key in _TIMES)
    return [*predicted, measured + (f" ({spread})" if spread else "")]


def _between(several: Sequence[float], how: str) -> str:
    """The least and the most; nothing of fewer than two."""
    ends = (how.format(bound) for bound in (min(several), max(several))) if len(several) > 1 else ()
    return " to ".join(ends)


def _summed(facts: Mapping[str, Any]) -> dict[str, Any]:
    rows = facts["rows"]
    ratios = _between(facts.get("found / best, processes", ()), "{:.2f}")
    twice = _between(facts.get("again, processes", ()), "{:.3f}")
    differ = ", ".join(plan for plan, row in rows.items() if row["differ"]) or "none"
    more = {"ratios": ratios and f"; {ratios}", "twice": twice and f" ({twice})"}
    return {**facts, **more, "apart": max(row["apart"] for row in rows.values()), "other": differ}
