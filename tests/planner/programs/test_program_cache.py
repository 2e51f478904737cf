"""Programs on disk: whole or not at all, and not without end."""

from __future__ import annotations

import os

import pytest

from isoshard.planner.programs.compile_worker import ProgramCache, default_folder


def test_what_was_put_is_found(tmp_path):
    cache = ProgramCache(tmp_path / "new")
    assert cache.get("a") is None
    cache.put("a", {"text": "x" * 1000, "memory": {"peak": 3}})
    assert ProgramCache(tmp_path / "new").get("a") == {"text": "x" * 1000, "memory": {"peak": 3}}
    (tmp_path / "new" / "a.json.gz").write_bytes(b"damaged")
    assert cache.get("a") is None


def test_what_was_used_longest_ago_goes(tmp_path):
    cache = ProgramCache(tmp_path, limit=1)
    big = ProgramCache(tmp_path)
    for at, key in enumerate("abc"):
        big.put(key, {"text": os.urandom(64).hex()})
        os.utime(tmp_path / f"{key}.json.gz", ns=(at, at))
    assert big.get("a") is not None  # used now
    cache.limit = 3 * (tmp_path / "a.json.gz").stat().st_size + 30
    cache.put("d", {"text": os.urandom(64).hex()})
    assert [key for key in "abcd" if cache.get(key)] == ["a", "c", "d"]


def test_nothing_is_left_of_a_value_that_cannot_be_written(tmp_path):
    cache = ProgramCache(tmp_path)
    with pytest.raises(TypeError):
        cache.put("a", {"text": object()})
    assert list(tmp_path.iterdir()) == []


def test_where_it_is(monkeypatch, tmp_path):
    monkeypatch.setenv("ISOSHARD_PLAN_CACHE", str(tmp_path / "own"))
    assert default_folder() == tmp_path / "own"
    monkeypatch.delenv("ISOSHARD_PLAN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "isoshard" / "plan"
