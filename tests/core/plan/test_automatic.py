"""`Plan.auto` asks who was noted to find plans, and core/plan knows nothing of it."""

from __future__ import annotations

import pytest

from isoshard.core.errors import ShardingError
from isoshard.core.plan import Plan, automatic


@pytest.fixture
def nobody(monkeypatch):
    monkeypatch.setattr(automatic, "_loaders", [])


def test_it_passes_all_on_and_gives_what_comes_back(nobody):
    asked = []

    def finder(*args, **options):
        asked.append((args, options))
        return Plan({"*": None})

    automatic.register_search(lambda: finder)
    assert Plan.auto("step", ("x",), "mesh", memory=7) == Plan({"*": None})
    assert asked == [(("step", ("x",), "mesh"), {"memory": 7, "fixed": None})]


def test_without_anybody_it_says_so(nobody):
    with pytest.raises(
        ShardingError, match="no planner is registered to search for a plan: import isoshard"
    ):
        Plan.auto("step", (), "mesh")
