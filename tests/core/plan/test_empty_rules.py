"""A plan of no rules, in any spelling, lays nothing out."""

from __future__ import annotations

import pytest

from isoshard.core.layout.mesh import make_mesh
from isoshard.core.plan import Plan


@pytest.mark.parametrize("rules", [{}, [], ()])
def test_no_rules(rules):
    mesh = make_mesh((8,), ("x",))
    assert Plan(rules) == Plan({})
    (leaf,) = Plan(rules, default=None).resolve({"w": (8,)}, mesh).leaves
    assert leaf.sharding.is_fully_replicated
