"""Counters, compilations and the report."""

import sys
import threading

import pytest

import isoshard.metrics
from isoshard.core.runtime import metrics
from isoshard.core.runtime.formatting import human_bytes


@pytest.fixture(autouse=True)
def _clean():
    metrics.reset()
    yield
    metrics.reset()


def test_counters_start_at_zero_and_add():
    assert set(metrics.counters()) == set(metrics.DESCRIPTIONS)
    assert not any(metrics.counters().values())
    metrics.count("executions")
    metrics.count("copied_bytes", 10)
    metrics.count("copied_bytes", 5)
    assert metrics.counters()["executions"] == 1
    assert metrics.counters()["copied_bytes"] == 15
    metrics.counters()["executions"] = 7  # of a copy
    assert metrics.counters()["executions"] == 1


def test_no_count_is_lost_between_threads():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        work = [
            threading.Thread(target=lambda: [metrics.count("executions") for _ in range(4_000)])
            for _ in range(8)
        ]
        for thread in work:
            thread.start()
        for thread in work:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert metrics.counters()["executions"] == 32_000


def test_report_names_cause_place_and_time():
    metrics.count("transfers.host_to_device_bytes", 3 << 20)
    metrics.count("my.own", 1234)
    metrics.record_compilation("step", "first call", "train.py:9", 1.5)
    metrics.record_compilation("eval", "new shape", "train.py:12", 0.25)
    assert metrics.report().splitlines() == [
        "compilations                           2  programs compiled",
        "transfers.host_to_device_bytes   3.0 MiB  bytes sent to devices",
        "my.own                             1,234",
        "",
        "compiled: 2 programs in 1.75 s",
        "  step  train.py:9   1.50 s  first call",
        "  eval  train.py:12  0.25 s  new shape",
    ]
    assert metrics.compilations()[0] == metrics.Compilation("step", "first call", "train.py:9", 1.5)
    assert metrics.counters()["compilations"] == 2
    metrics.reset()
    assert metrics.report() == "nothing was counted"
    sizes = {0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 5 << 40: "5.0 TiB"}
    assert {size: human_bytes(size) for size in sizes} == sizes
    assert isoshard.metrics.count is metrics.count


def _call_through(module_name, callee):
    """Call `callee` from a function that claims to live in `module_name`."""
    namespace = {"__name__": module_name}
    exec(compile("def call(f): return f()", "/internal/file.py", "exec"), namespace)
    return namespace["call"](callee)


@pytest.mark.parametrize(
    "inner", ["torch.nn.modules", "jax._src.api", "isoshard.core.transfer.device_put"]
)
def test_user_location_skips_the_frameworks(inner):
    line = _call_through.__code__.co_firstlineno + 4
    assert _call_through(inner, metrics.user_location) == f"test_metrics.py:{line}"


@pytest.mark.parametrize("mine", ["torchlike.model", "isoshard.cli.demo", "__main__"])
def test_user_location_keeps_code_that_is_not_theirs(mine):
    assert _call_through(mine, metrics.user_location) == "file.py:1"
