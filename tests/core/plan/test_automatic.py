"""`Plan.auto` calls the search that the planner provides; core imports no planner."""

from __future__ import annotations

from isoshard.core import extensions
from isoshard.core.plan import Plan


def test_arguments_and_result_are_those_of_the_search(monkeypatch):
    calls = []

    def search(*args, **options):
        calls.append((args, options))
        return Plan({"*": None})

    monkeypatch.setattr(extensions, "search_plan", search)
    assert Plan.auto("step", ("x",), "mesh", memory=7) == Plan({"*": None})
    assert calls == [(("step", ("x",), "mesh"), {"memory": 7, "fixed": None})]
