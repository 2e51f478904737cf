"""The table of docs/domain.md: formulas in words, and bytes of compiled programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tools.harness import tables

from .cases import Case

_HEAD = ("operator", "forward", "backward", "bytes, even blocks", "bytes, uneven blocks")


def markdown(results: dict[str, Any], cases: Sequence[Case]) -> str:
    """Write the table.

    Args:
        results: by name, split and scaling, as `benchmarks.domain_scaling.grouped` gives them.
        cases: what they are of.

    Returns:
        A table in Markdown; bytes are of weak scaling, forward and backward together, from the
        fewest devices to the most.
    """
    rows = []
    for case in cases:
        splits = results[case.name]
        ends = [_ends(splits[split]["weak"]) if split in splits else "" for split in _SPLITS]
        rows.append([f"`{case.name}`", *case.labels, *ends])
    return tables.markdown(_HEAD, rows) + "\n"


_SPLITS = ("even", "uneven")


def _ends(curve: dict[str, Any]) -> str:
    first, last = (round(curve["forward"][at] + curve["backward"][at]) for at in (0, -1))
    most = curve["devices"][-1]
    return f"{first:,} to {last:,}" + (f" (of {most})" if most != 512 else "")
