"""Planning for hardware that is not attached: `iso.planner`.

>>> import isoshard as iso
>>> machine = iso.planner.topology("v5e:16x16")
>>> mesh = machine.mesh((16, 16), ("data", "model"))
>>> machine.size, dict(mesh.shape)
(256, {'data': 16, 'model': 16})

`estimate(step, args, mesh, plan)` returns a `Report`, `search` finds a plan, `compare` shows
reports side by side. Each name is loaded when it is first used.
"""

from __future__ import annotations

if __name__ != "isoshard.planner":
    raise ImportError(f"import isoshard.planner, not {__name__}: pip install -e . first")

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .estimating import estimate
    from .machine.chips import Chip, add_chip, chip, chips
    from .machine.links import AxisLinks, links, links_of
    from .machine.topologies import Topology, topology, topology_of
    from .plan_search.search_result import NothingFitsError, SearchResult
    from .plan_search.searching import search
    from .programs.slice_crossings import check_crossings, crossings
    from .reports.advice import advise
    from .reports.comparison import Comparison, compare
    from .reports.report import Report

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
    """Import a public name at its first use."""
    if name not in _LAZY:
        raise AttributeError(f"module 'isoshard.planner' has no attribute {name!r}")
    result = getattr(importlib.import_module(f"isoshard.planner.{_LAZY[name]}"), name)
    globals()[name] = result
    return result


def __dir__() -> list[str]:
    """The public names, those not loaded yet included."""
    return sorted(__all__)
