"""Samples: how many, their sum, and the latest of them."""

import pytest

from isoshard.core.runtime import metrics, samples


@pytest.fixture(autouse=True)
def _clean():
    samples.clear()
    yield
    samples.clear()


def test_only_the_latest_are_kept_and_all_are_counted():
    for n in range(samples.KEPT + 10):
        samples.observe("x_seconds", float(n))
    found = samples.series()["x_seconds"]
    assert found.count == samples.KEPT + 10 and found.total == sum(range(samples.KEPT + 10))
    assert [value for _, value in found.latest] == [float(n + 10) for n in range(samples.KEPT)]
    times = [when for when, _ in found.latest]
    assert times == sorted(times)


def test_metrics_give_samples():
    metrics.reset()
    metrics.record_compilation("step", "first", "a.py:1", 0.5)
    metrics.record_transfer("host_to_device", 4, "a.py:1")
    metrics.record_transfer("host_to_device", 8, "a.py:1", 0.25)
    found = {name: (one.count, one.total) for name, one in samples.series().items()}
    assert found == {
        "compile_seconds": (1, 0.5),
        "host_to_device_bytes": (2, 12),
        "host_to_device_seconds": (1, 0.25),
    }
    metrics.reset_counters()
    assert samples.series() and metrics.compilations() and not any(metrics.counters().values())
    metrics.reset()
    assert samples.series() == {} and metrics.compilations() == []
