"""The benchmark of loaders, on a small scale."""

from __future__ import annotations

from rich.console import Console

from benchmarks import loading


def test_an_epoch_is_measured_for_both_kinds_of_loaders(monkeypatch):
    monkeypatch.setattr(loading, "ROWS", 16)
    monkeypatch.setattr(loading, "WIDTH", 8)
    work = loading.Work()
    results = {
        "sleep": loading.measure(work, loading.Sleeping(work.batch, 3, 0.001), rounds=1),
        "numpy": loading.measure(work, loading.Computing(work.batch, 3, 0.001), rounds=1),
    }
    for found in results.values():
        assert found["batches"] == 3 and found["ratio"] > 0 < found["ratio_in_turns"]
        assert found["epoch"]["loader alone"]["median_ms"] >= 3 or found is results["numpy"]
    console = Console(width=110, record=True)
    console.print(loading.table(results))
    assert "MpDeviceLoader" in console.export_text()
