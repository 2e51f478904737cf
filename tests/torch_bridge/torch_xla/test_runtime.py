"""runtime: counts, ordinals, SPMD mode, the compilation cache."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import pytest
import torch

from isoshard.torch_bridge.session import unplanned_steps
from isoshard.torch_bridge.torch_xla import runtime as xr


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_counts_and_ordinals_are_those_of_torch_xla_in_spmd_mode():
    ones = ("world_size", "global_device_count", "local_device_count", "addressable_device_count")
    ones += ("process_count", "local_process_count")
    zeros = ("global_ordinal", "local_ordinal", "process_index", "host_index")
    assert {name: getattr(xr, name)() for name in ones} == dict.fromkeys(ones, 1)
    assert {name: getattr(xr, name)() for name in zeros} == dict.fromkeys(zeros, 0)
    assert xr.global_runtime_device_count() == xr.addressable_runtime_device_count() == 8


def test_spmd_mode(monkeypatch):
    for name in ("XLA_USE_SPMD", "XLA_AUTO_SPMD"):
        monkeypatch.setenv(name, "0")
    assert not xr.is_spmd() and not xr.auto_spmd()
    xr.use_spmd()
    assert xr.is_spmd() and not xr.auto_spmd()
    xr.use_spmd(auto=True)
    assert xr.is_spmd() and xr.auto_spmd()
    unplanned_steps.compiled()  # else it would warn of the next optimizer's step
    monkeypatch.setenv("XLA_USE_SPMD", "true")
    assert xr.is_spmd()


def test_what_is_known_of_chips():
    assert xr.device_type() == "CPU" and xr.is_bf16_supported()
    assert torch.ones(1, dtype=torch.bfloat16, device="jax").dtype == torch.bfloat16
    found = xr.global_runtime_device_attributes()
    assert [one["name"] for one in found] == [f"CPU:{n}" for n in range(8)]
    assert xr.runtime_device_attributes("CPU:3")["name"] == "CPU:3"
    assert xr.runtime_device_attributes("jax:0")["name"] == "CPU:0"
    with pytest.raises(RuntimeError, match="'GPU:0' is no device here"):
        xr.runtime_device_attributes("GPU:0")


def test_a_tpu_says_where_it_is():
    class Tpu:
        platform = "tpu"
        coords = (0, 1, 0)
        core_on_chip = 0

    import isoshard.torch_bridge.session.hardware as hardware

    devices = [Tpu(), Tpu()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda: devices)
        assert hardware.chip_names() == ["TPU:0", "TPU:1"]
        found = xr.global_runtime_device_attributes()
    assert found[1] == {"name": "TPU:1", "coords": (0, 1, 0), "core_on_chip": 0}


def test_the_device_type_is_fixed_once_jax_runs(monkeypatch):
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    before = jax.config.jax_num_cpu_devices
    xr.set_device_type("CPU")
    with pytest.raises(RuntimeError, match=r"cannot become 'TPU': JAX is running on CPU already"):
        xr.set_device_type("TPU")
    with pytest.raises(ValueError, match="'QUANTUM' is none of CPU, TPU"):
        xr.set_device_type("QUANTUM")
    assert jax.config.jax_num_cpu_devices == before and os.environ["PJRT_DEVICE"] == "CPU"


def test_the_device_type_is_chosen_before_jax_runs():
    code = """
import jax
from isoshard.torch_bridge.session import unplanned_steps
from isoshard.torch_bridge.torch_xla import runtime as xr
xr.set_device_type("TPU")
assert jax.config.jax_platforms == "tpu"
xr.set_device_type("CPU")
print(xr.device_type(), jax.config.jax_platforms, len(jax.devices()))
"""
    assert run(code) == "CPU cpu 1"


def test_the_address_of_process_0(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert xr.get_master_ip() == "127.0.0.1"
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    with pytest.raises(RuntimeError, match=r"one of 4 processes.* set MASTER_ADDR"):
        xr.get_master_ip()
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.7")
    assert xr.get_master_ip() == "10.0.0.7"


CACHE = """
import sys, torch
import isoshard.torch_bridge as xs
from isoshard.core import metrics
from isoshard.torch_bridge.session import unplanned_steps
from isoshard.torch_bridge.torch_xla import runtime as xr
xr.initialize_cache(sys.argv[1] if len(sys.argv) > 1 else FOLDER, readonly=READONLY)
assert xr.get_num_cached_compilation_graph() == 0
x = torch.arange(4.0).to("jax")
assert (x + SHIFT.to("jax")).exp().sum().isfinite().item()
assert xr.get_num_cached_compilation_graph() == 1
for wrong in range(2):
    try:
        xr.initialize_cache(FOLDER)
    except RuntimeError as error:
        message = str(error)
print(metrics.counters()["cache_hits"], message)
"""


def test_the_cache_serves_the_next_process(tmp_path):
    def start(readonly: bool, shift: float = 1.0) -> tuple[str, str, int]:
        code = CACHE.replace("FOLDER", repr(str(tmp_path / "cache")))
        code = code.replace("READONLY", str(readonly)).replace(
            "SHIFT", f"torch.full((4,), {shift})"
        )
        code = code.replace(".exp()", ".exp()" if shift == 1.0 else ".cos()")
        hits, _, message = run(code).partition(" ")
        return hits, message, len(list((tmp_path / "cache").glob("*-cache")))

    first, message, written = start(readonly=False)
    assert first == "0" and written > 0
    assert "initialised already, by an earlier call" in message
    assert start(readonly=True)[::2] == ("1", written)
    assert start(readonly=True, shift=2.0)[::2] == ("0", written)  # it is not written to
    assert start(readonly=False, shift=2.0)[2] > written


def test_a_cache_to_read_must_be_there(tmp_path):
    code = f"""
from isoshard.torch_bridge.session import unplanned_steps
from isoshard.torch_bridge.torch_xla import runtime as xr
try:
    xr.initialize_cache({str(tmp_path / "none")!r}, readonly=True)
except FileNotFoundError as error:
    print(error)
"""
    assert "there is no compilation cache" in run(code)


def test_a_late_cache_is_refused(tmp_path):
    assert torch.ones(2, device="jax").sum().item() == 2.0
    with pytest.raises(RuntimeError, match="when the first program was compiled; call"):
        xr.initialize_cache(str(tmp_path / "late"))
    assert not (tmp_path / "late").exists()
