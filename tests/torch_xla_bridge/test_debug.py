"""debug.metrics and debug.profiler."""

from __future__ import annotations

import re

import pytest
import torch

import isoshard.torch_xla_bridge.torch_xla as torch_xla
from isoshard.core.runtime import metrics, samples
from isoshard.torch_xla_bridge.torch_xla.debug import metrics as met
from tests import fresh


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    monkeypatch.setenv("XLA_USE_SPMD", "0")
    torch_xla.sync()
    met.clear_all()
    yield
    met.clear_all()


def work(shift: float, size: int = 16) -> None:
    """A program for each size."""
    x = torch.arange(float(size)).to("jax")
    y = (x + torch.full((size,), shift).to("jax")).cos()
    torch_xla.sync()
    y.cpu()


def test_nothing_was_counted():
    assert met.counter_names() == met.metric_names() == met.executed_fallback_ops() == []
    assert met.counter_value("MarkStep") is None and met.metric_data("CompileTime") is None
    assert met.metrics_report() == met.short_metrics_report() == ""


def test_counters_and_times(monkeypatch):
    for n in range(3):
        work(float(n), 24)
    assert met.counter_value("UncachedCompile") == 1
    assert met.counter_value("CachedCompile") == 2
    assert met.counter_value("ExecuteComputation") == 3
    assert met.counter_value("MarkStep") == 3
    count, total, latest = met.metric_data("CompileTime")
    (compilation,) = metrics.compilations()
    assert count == 1 and total == pytest.approx(compilation.seconds * 1e9)
    assert latest[0][1] == total and latest[0][0] > 1.6e9
    names = {"CompileTime", "ExecuteTime", "TransferToDeviceTime", "TransferFromDeviceTime"}
    others = {"InboundData", "OutboundData", "InputOutputAliasCount"}
    assert set(met.metric_names()) == names | others
    for name in names - {"CompileTime"}:
        count, total, latest = met.metric_data(name)
        assert count >= 3 and total == pytest.approx(sum(value for _, value in latest))
        assert all(0 < value < 60e9 for _, value in latest)
    assert met.metric_data("InboundData")[:2] == (3, 3 * 24 * 4)
    assert met.metric_data("OutboundData")[1] >= 3 * 24 * 4
    assert met.metric_data("ExecuteReplicatedTime") == met.metric_data("ExecuteTime")
    assert met.counter_value("isoshard::peak_bytes") > 0  # our own counters have our name
    assert met.counter_value("isoshard::transfers.device_to_host") == 3
    monkeypatch.setenv("XLA_USE_SPMD", "1")
    assert met.counter_value("ExecuteReplicated") == 3
    assert met.counter_value("ExecuteComputation") is None
    assert "ExecuteReplicatedTime" in met.metric_names() and "ExecuteTime" not in met.metric_names()
    assert met.metric_data("ExecuteTime")[0] == 3


def test_operators_on_the_cpu_are_counted():
    x = torch.tensor([0.0, 2.0, 3.0]).to("jax")
    assert x.nonzero().tolist() == [[1], [2]]
    assert x[x > 1].tolist() == [2.0, 3.0]
    assert met.counter_value("aten::nonzero") == 1
    assert "aten::nonzero" in met.executed_fallback_ops()
    assert len(met.executed_fallback_ops()) == 2  # and the boolean index
    assert "Counter: aten::nonzero\n  Value: 1\n" in met.short_metrics_report()
    assert met.counter_value("fallbacks") is None
    metrics.count("fallbacks.mine::operator", 3)
    assert met.counter_value("mine::operator") == 3
    assert "mine::operator" in met.executed_fallback_ops()


def test_clearing_one_kind():
    work(0.0)
    met.clear_counters()
    assert met.counter_names() == [] and met.metric_data("ExecuteTime")[0] == 1
    work(0.0)
    met.clear_metrics()
    assert met.metric_names() == [] and met.counter_value("CachedCompile") == 1
    assert samples.series() == {}


def test_the_report_is_written_as_torch_xla_writes_it():
    for value in (1_500.0, 61e9, 5_250_000.0):
        samples.observe("compile_seconds", value / 1e9)
    samples.observe("device_to_host_bytes", 3348)
    metrics.count("syncs", 4)
    report = met.metrics_report()
    assert report.startswith("Metric: CompileTime\n  TotalSamples: 3\n  Accumulator: ")
    assert "  Accumulator: 01m01s005ms251.500us\n" in report
    assert re.search(r"  ValueRate: .*us / second\n  Rate: .* / second\n", report)
    assert "1%=001.500us; 5%=001.500us" in report and "99%=01m01s000ms000.000us" in report
    assert "Metric: InboundData\n  TotalSamples: 1\n  Accumulator: 3.27KB\n" in report
    assert report.endswith("Counter: MarkStep\n  Value: 4\n")
    short = met.short_metrics_report(counter_names=["X"], metric_names=["InboundData"])
    assert short.startswith("Metric: InboundData") and "Counter" not in short


# --- Profiles, in a process of their own: they hold each program of the process ------------------

PROFILES = """
import threading, time
from pathlib import Path

import jax, pytest, torch
import isoshard.torch_xla_bridge.torch_xla
from isoshard.torch_xla_bridge.torch_xla.debug import metrics as met
from isoshard.torch_xla_bridge.torch_xla.debug import profiler as xp
from isoshard.torch_xla_bridge.torch_xla.utils.utils import get_free_tcp_ports


def names_in(folder):
    (path,) = Path(folder).rglob("*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(path)).planes
    return {event.name for plane in planes for line in plane.lines for event in line.events}


@xp.trace_me("my function")
def function(x):
    'Adds.'
    return x + 1


xp.start_trace(Path("begun"))
with pytest.raises(RuntimeError, match="already been started"):
    xp.start_trace("begun")
x = torch.ones(3, device="jax")
with xp.StepTrace("my step", step_num=3):
    with xp.Trace("my span", note="text"):
        y = function(x)
assert met.counter_value("MarkStep") == 1 and function.__doc__ == "Adds."
xp.stop_trace()
with pytest.raises(RuntimeError, match="No profile"):
    xp.stop_trace()
assert {"my step", "my span", "my function"} <= names_in("begun")
assert y.tolist() == [2.0] * 3

with pytest.raises(ValueError, match="which has none"):
    xp.trace("localhost:9012", "served")
with pytest.raises(ValueError, match="0 is no port"):
    xp.start_server(0)
(port,) = get_free_tcp_ports()
assert xp.start_server(port) is not None
with pytest.raises(RuntimeError, match=f"runs already, on port {port}"):
    xp.start_server(port + 1)
with pytest.raises(ValueError, match=rf"'other:{port}' is not this process's .localhost"):
    xp.trace(f"other:{port}", "served")
xp.trace_detached(f"localhost:{port}", "served", duration_ms=300, delay_ms=1)
deadline = time.monotonic() + 60
while any("trace" in one.name for one in threading.enumerate()) and time.monotonic() < deadline:
    with xp.Trace("while it is profiled"):
        time.sleep(0.01)
assert "while it is profiled" in names_in("served")
"""


def test_profiles_by_calls_and_by_the_server(tmp_path):
    done = fresh.run(PROFILES, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
