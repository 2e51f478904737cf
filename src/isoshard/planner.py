"""Planning ahead of time, for hardware that is not attached: `iso.planner`.

>>> import isoshard as iso
>>> machine = iso.planner.topology("v5e:16x16")
>>> mesh = machine.mesh((16, 16), ("data", "model"))
>>> machine.size, dict(mesh.shape)
(256, {'data': 16, 'model': 16})

`estimate(step, args, mesh, plan)` gives a `Report`, `search` finds a plan, `compare` puts reports
side by side. Each name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isoshard.core.planner.estimating import estimate
    from isoshard.core.planner.machine.chips import Chip, add_chip, chip, chips
    from isoshard.core.planner.machine.links import AxisLinks, links, links_of
    from isoshard.core.planner.machine.topologies import Topology, topology, topology_of
    from isoshard.core.planner.plan_search.search_result import NothingFitsError, SearchResult
    from isoshard.core.planner.plan_search.searching import search
    from isoshard.core.planner.programs.slice_crossings import check_crossings, crossings
    from isoshard.core.planner.reports.advice import advise
    from isoshard.core.planner.reports.comparison import Comparison, compare
    from isoshard.core.planner.reports.report import Report

_CORE = "isoshard.core.planner"
_LAZY = {
    "AxisLinks": "machine.links",
    "Chip": "machine.chips",
    "Comparison": "reports.comparison",
    "NothingFitsError": "plan_search.search_result",
    "Report": "reports.report",
    "SearchResult": "plan_search.search_result",
    "Topology": "machine.topologies",
    "add_chip": "machine.chips",
    "advise": "reports.advice",
    "check_crossings": "programs.slice_crossings",
    "chip": "machine.chips",
    "chips": "machine.chips",
    "compare": "reports.comparison",
    "crossings": "programs.slice_crossings",
    "estimate": "estimating",
    "links": "machine.links",
    "links_of": "machine.links",
    "search": "plan_search.searching",
    "topology": "machine.topologies",
    "topology_of": "machine.topologies",
}

__all__ = [
    "AxisLinks",
    "Chip",
    "Comparison",
    "NothingFitsError",
    "Report",
    "SearchResult",
    "Topology",
    "add_chip",
    "advise",
    "check_crossings",
    "chip",
    "chips",
    "compare",
    "crossings",
    "estimate",
    "links",
    "links_of",
    "search",
    "topology",
    "topology_of",
]


def __getattr__(name: str) -> Any:
    """Load a name lazily."""
    if name not in _LAZY:
        raise AttributeError(f"module 'isoshard.planner' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{_CORE}.{_LAZY[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, those not loaded yet included."""
    return sorted(__all__)
