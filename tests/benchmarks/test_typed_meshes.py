"""The two steps that are compared run on their meshes; the TPU needs its compiler."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from benchmarks import offload, typed_meshes


def test_the_step_is_timed_on_both_meshes():
    row = typed_meshes.measure(1, 2)
    assert row["explicit_ms"] > 0 and row["auto_ms"] > 0
    assert row["ratio"] == pytest.approx(row["explicit_ms"] / row["auto_ms"])
    assert typed_meshes.table({"1 layer": row}).row_count == 1


def test_without_the_tpus_compiler_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["offload"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install libtpu"):
        offload.main()


def test_what_is_less_on_the_device_is_shown():
    rows = {
        "on the device": {"given_mib": 3.0, "temporaries": 1.0, "device_mib": 4.0, "host_mib": 0.0},
        "on the host": {"given_mib": 1.0, "temporaries": 1.5, "device_mib": 2.5, "host_mib": 2.0},
    }
    assert offload.table(rows).caption == "1.5 MiB less on each device"
