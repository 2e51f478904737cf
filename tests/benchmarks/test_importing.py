"""Imports are timed in processes of their own, and one that fails ends the benchmark."""

from __future__ import annotations

import os
import subprocess

import pytest

from benchmarks import importing


def test_what_is_timed(monkeypatch):
    monkeypatch.setattr(importing, "IMPORTS", {"isoshard": "jax", "isoshard.metrics": "isoshard"})
    found = importing.measure(1)
    for row in found.values():
        assert row["bare_ms"] > 0 and row["ours_ms"] >= 0
        assert row["ratio"] == pytest.approx(1 + row["ours_ms"] / row["bare_ms"])
    assert 20 < found["isoshard"]["modules"] < 200
    assert found["isoshard.metrics"]["modules"] == 0
    assert importing.table(found).row_count == 2
    assert "| `isoshard` | `jax` |" in importing.markdown(found)


def test_an_import_that_fails(capfd):
    with pytest.raises(subprocess.CalledProcessError):
        importing.one_process("isoshard.none", "sys", os.environ)
    assert "No module named 'isoshard.none'" in capfd.readouterr().err
