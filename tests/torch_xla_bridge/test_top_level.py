"""torch_xla's top-level functions, `runtime` and `backends`."""

from __future__ import annotations

import os

import jax
import pytest
import torch

import isoshard.torch_bridge as xs
import isoshard.torch_xla_bridge.torch_xla as torch_xla
from isoshard.core.runtime import metrics
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.execution import runtime as bridge_runtime
from isoshard.torch_bridge.spmd import unplanned_steps
from isoshard.torch_xla_bridge.export import lowered
from isoshard.torch_xla_bridge.torch_xla import backends
from isoshard.torch_xla_bridge.torch_xla import runtime as xr
from isoshard.torch_xla_bridge.torch_xla.core import xla_model as xm


def is_executed(tensor: torch.Tensor) -> bool:
    assert isinstance(tensor, lazy_tensor.LazyTensor)
    return lazy_tensor.read(tensor).array is not None


def test_devices(monkeypatch):
    monkeypatch.setenv("XLA_USE_SPMD", "0")
    assert torch_xla.device() == torch_xla.device(0) == torch.device("jax", 0)
    assert torch_xla.devices() == [torch_xla.device()]
    assert torch_xla.real_devices() == [f"CPU:{n}" for n in range(8)]
    assert torch_xla.device_count() == 8
    assert torch.ones(2, device=torch_xla.device()).device == torch_xla.device()
    with pytest.raises(IndexError, match=r"one logical device, jax:0, and index 3 was requested"):
        torch_xla.device(3)
    monkeypatch.setenv("XLA_USE_SPMD", "1")
    assert torch_xla.device(3) == torch_xla.device()
    assert torch_xla.__version__.startswith("2.9") and "isoshard" in torch_xla.__version__
    assert xs.xla_device is xm.xla_device


def test_sync_executes_and_runs_closures(monkeypatch):
    x = torch.ones(3, device="jax") * 2
    seen = []
    xm.add_step_closure(lambda value: seen.append(value.sum().item()), args=(x,))
    assert not is_executed(x) and not seen
    torch_xla.sync()
    assert is_executed(x) and seen == [6.0]
    torch_xla.sync(wait=True, reset_scope=False)
    assert seen == [6.0]
    waits = []
    monkeypatch.setattr(bridge_runtime, "sync", lambda *, wait: waits.append(wait))
    torch_xla.sync()
    monkeypatch.setenv("XLA_SYNC_WAIT", "1")
    torch_xla.sync()
    assert waits == [False, True]


def test_step_separates_programs_and_ends_with_sync_also_after_an_error(counted):
    x = torch.ones(3, device="jax") + 5
    with torch_xla.step():
        assert is_executed(x)
        y = x * 2
        assert not is_executed(y)
    assert is_executed(y)
    assert counted("executions") == 2
    torch.testing.assert_close(y.cpu(), torch.full((3,), 12.0))
    kept = []
    with pytest.raises(KeyError, match="mine"):
        with torch_xla.step():
            kept.append(x + 1)
            raise KeyError("mine")
    assert is_executed(kept[0])


@pytest.mark.parametrize("form", ["call", "decorator", "decorator with arguments", "module"])
def test_compile_runs_a_function_as_one_program(form, counted):
    calls = []

    def function(x):
        """Doubles."""
        calls.append(1)
        return (x * 2).exp()

    if form == "call":
        compiled = torch_xla.compile(function)
    elif form == "decorator":
        compiled = torch_xla.compile()(function)
    elif form == "module":
        module = torch.nn.Module()
        module.forward = function
        compiled = torch_xla.compile(module)
    else:
        compiled = torch_xla.compile(full_graph=True, name="doubling")(function)
    if form != "module":
        assert compiled.__name__ == "function" and compiled.__doc__ == "Doubles."
    before = torch.arange(3.0).to("jax") + 1
    got = compiled(before)
    assert is_executed(got) and counted("executions") == 2
    torch.testing.assert_close(got.cpu(), ((torch.arange(3.0) + 1) * 2).exp())
    compiled(before)
    assert len(calls) == 2  # Python runs in every call


def test_full_graph_refuses_execution_inside():
    @torch_xla.compile(full_graph=True)
    def reads(x):
        return x.sum().item()

    x = torch.ones(3, device="jax")
    with pytest.raises(RuntimeError, match=r"test_top_level.py:\d+: reads was to be one program"):
        reads(x + 1)
    assert (x + 1).sum().item() == 6.0  # outside, nothing is left of it

    @torch_xla.compile(full_graph=True)
    def steps(x):
        y = x + 1
        torch_xla.sync()
        return y

    with pytest.raises(RuntimeError, match="full_graph=True"):
        steps(x)
    scaled = torch_xla.compile(lambda x, factor: x * factor.item(), full_graph=True)
    factor = torch.full((), 3.0, device="jax") * 2  # what is there may be read
    assert scaled(torch.ones(2, device="jax"), factor).tolist() == [6.0, 6.0]


def test_too_many_graphs_are_refused(counted):
    compiled = torch_xla.compile(lambda x: x + 1, name="grows", max_different_graphs=2)
    for size in (3, 4, 3, 4):
        assert compiled(torch.ones(size, device="jax")).tolist() == [2.0] * size
    with pytest.raises(RuntimeError, match=r"grows records another program, and max_diff.*=2"):
        compiled(torch.ones(5, device="jax"))
    assert compiled(torch.ones(3, device="jax")).tolist() == [2.0] * 3
    other = torch_xla.compile(lambda x: (x + 7).cos(), name="my step", max_different_graphs=1)
    other(torch.ones(5, device="jax"))
    assert any(c.what.endswith("operations of my step") for c in metrics.compilations())
    with pytest.raises(ValueError, match="1 or more"):
        torch_xla.compile(max_different_graphs=0)


def test_regions_nest():
    inner = torch_xla.compile(lambda x: x * 3, full_graph=True)

    @torch_xla.compile
    def outer(x):
        y = inner(x + 1)
        return y.sum().item()

    assert outer(torch.ones(2, device="jax")) == 12.0

    @torch_xla.compile(full_graph=True)
    def strict(x):
        return inner(x + 1)

    with pytest.raises(RuntimeError, match="strict was to be one program"):
        strict(torch.ones(2, device="jax"))

    def countdown(x, n):
        return x if n == 0 else recursive(x + 1, n - 1)

    recursive = torch_xla.compile(countdown)
    assert recursive(torch.zeros(1, device="jax"), 3).item() == 3.0


def test_manual_seed():
    torch_xla.manual_seed(3)
    first = torch.rand(4, device="jax")
    torch_xla.manual_seed(3, device="jax:0")
    assert torch.equal(first, torch.rand(4, device="jax"))
    assert not torch.equal(first, torch.rand(4, device="jax"))
    with pytest.raises(RuntimeError, match="there is no device"):
        torch_xla.manual_seed(3, device="TPU:0")


def test_launch_is_of_one_replica(monkeypatch):
    monkeypatch.setenv("XLA_USE_SPMD", "1")
    with pytest.raises(NotImplementedError, match=r"an SPMD script is one: call main\(0, \*args\)"):

        def main(index):
            raise AssertionError

        torch_xla.launch(main)
    monkeypatch.setenv("XLA_USE_SPMD", "0")
    seen = []
    torch_xla.launch(lambda index, name: seen.append((index, name)), ("x",), "fork", True)
    assert seen == [(0, "x")]
    with pytest.raises(NotImplementedError, match=r"there are 8 chips, and as many replicas"):
        torch_xla.launch(print)


# --- runtime -------------------------------------------------------------------------------------


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
    with pytest.raises(RuntimeError, match="there is no device 'GPU:0'"):
        xr.runtime_device_attributes("GPU:0")


def test_a_tpu_says_where_it_is():
    class Tpu:
        platform = "tpu"
        coords = (0, 1, 0)
        core_on_chip = 0

    import isoshard.torch_bridge.device.hardware as hardware

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


def test_the_address_of_process_0(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert xr.get_master_ip() == "127.0.0.1"
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    with pytest.raises(RuntimeError, match=r"one of 4 processes.* set MASTER_ADDR"):
        xr.get_master_ip()
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.7")
    assert xr.get_master_ip() == "10.0.0.7"


def test_a_late_cache_is_refused(tmp_path):
    assert torch.ones(2, device="jax").sum().item() == 2.0
    with pytest.raises(RuntimeError, match="when the first program was compiled; call"):
        xr.initialize_cache(str(tmp_path / "late"))
    assert not (tmp_path / "late").exists()


# --- backends ------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _restored():
    before = jax.config.jax_default_matmul_precision
    jax.config.update("jax_default_matmul_precision", None)
    yield
    jax.config.update("jax_default_matmul_precision", before)


def product() -> torch.Tensor:
    x = torch.arange(35.0).reshape(5, 7).to("jax")
    xs.sync()
    return x @ x.T


def test_it_is_read_back():
    assert backends.get_mat_mul_precision() == "default"
    for precision in ("high", "highest", "default"):
        backends.set_mat_mul_precision(precision)
        assert backends.get_mat_mul_precision() == precision
        assert jax.config.jax_default_matmul_precision == precision
    with pytest.raises(ValueError, match="one of default, high, highest, and it is 'float64'"):
        backends.set_mat_mul_precision("float64")
    for own, name in (("tensorfloat32", "high"), ("float32", "highest"), ("bfloat16", "default")):
        jax.config.update("jax_default_matmul_precision", own)
        assert backends.get_mat_mul_precision() == name
    jax.config.update("jax_default_matmul_precision", "F64_F64_F64")
    with pytest.raises(RuntimeError, match="'F64_F64_F64', which is none of"):
        backends.get_mat_mul_precision()


def test_it_takes_effect_and_compiles_again(counted):
    want = product().tolist()
    assert "HIGHEST" not in lowered.stablehlo([product()])
    xs.sync()
    compiled = counted("compilations")
    backends.set_mat_mul_precision("highest")
    assert "precision = [HIGHEST, HIGHEST]" in lowered.stablehlo([product()])
    assert product().tolist() == want
    assert counted("compilations") == compiled + 1
    causes = [compilation.cause for compilation in metrics.compilations()]
    assert causes[-1] == "matmul precision highest, before None"
    with jax.default_matmul_precision(None):
        product().tolist()
    product().tolist()
    assert counted("compilations") == compiled + 1  # both programs are kept


def test_a_compiled_step_notices(counted):

    @xs.compile
    def step(x):
        metrics.count("test.step")
        return x @ x

    x = torch.eye(3, device="jax")
    for precision, captured in (("default", 1), ("highest", 2), ("highest", 2), ("default", 2)):
        backends.set_mat_mul_precision(precision)
        assert torch.equal(step(x).cpu(), torch.eye(3))
        assert counted("test.step") == captured
    assert len(step.replays) == 2
    assert ["operand_precision={highest,highest}" in r.program.text() for r in step.replays] in (
        [False, True],
        [False, False],  # the CPU computes all products exactly, and forgets what was asked
    )
