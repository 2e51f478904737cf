"""_XLAC, _internal.tpu, xla_env_vars and test.test_utils; programs as text and bytes."""

from __future__ import annotations

import os
import re
import signal
import unittest

import jax
import pytest
import torch

import isoshard.torch_bridge as xs
from isoshard.core.errors import DistributedError
from isoshard.torch_bridge.checkpoints import preemption
from isoshard.torch_xla_bridge.torch_xla import _XLAC
from isoshard.torch_xla_bridge.torch_xla._internal import tpu
from isoshard.torch_xla_bridge.torch_xla.core import xla_env_vars as xenv
from isoshard.torch_xla_bridge.torch_xla.debug import metrics as met
from isoshard.torch_xla_bridge.torch_xla.test import test_utils

MESH = xs.Mesh(range(8), (2, 4), ("x", "y"))


def test_layouts_and_the_runtime_as_the_extension_tells_them(counted):
    x, y = xs.mark_sharding(torch.ones(8, 8).to("jax"), MESH, (0, 1)), torch.ones(8).to("jax")
    assert _XLAC._get_xla_sharding_spec(x) == "{devices=[2,4]0,1,2,3,4,5,6,7}"
    assert _XLAC._get_xla_sharding_specs([x, y]) == ["{devices=[2,4]0,1,2,3,4,5,6,7}", ""]
    assert _XLAC._get_xla_sharding_type(x) == xs.ShardingType.TILED
    assert _XLAC._get_xla_sharding_types([x, y]) == [xs.ShardingType.TILED, None]
    assert _XLAC._xla_get_default_device() == _XLAC._xla_set_default_device("jax:0") == "jax:0"
    assert _XLAC._xla_get_devices() == ["jax:0"]
    chips = [f"CPU:{n}" for n in range(8)]
    assert _XLAC._xla_real_devices() == _XLAC._xla_get_all_runtime_devices() == chips
    x = torch.ones(3, device="jax") + 1
    _XLAC._xla_sync_multi([x], devices=[])
    assert counted("executions") == 1
    y = x + 1
    _XLAC._xla_step_marker("jax:0", [], wait=True, reset_scope=True)
    _XLAC._xla_wait_device_ops(devices=[])
    assert counted("executions") == 2 and y.tolist() == [3.0] * 3
    z = y * 2
    assert b"stablehlo.multiply" in _XLAC._get_stablehlo([z], "jax:0", [], False)
    assert _XLAC._get_stablehlo([z], "jax:0", [], True).startswith(b"ML\xefR")
    _XLAC._xla_set_rng_seed(3)
    assert _XLAC._xla_get_rng_seed() == 3
    assert _XLAC._xla_counter_value("MarkStep") == 1 and "MarkStep" in _XLAC._xla_counter_names()
    assert "Counter: MarkStep" in _XLAC._xla_metrics_report()


def test_without_a_tpu(monkeypatch):
    for name in ("TPU_PROCESS_BOUNDS", "CLOUD_TPU_TASK_ID", "TPU_WORKER_HOSTNAMES"):
        monkeypatch.delenv(name, raising=False)
    assert tpu.num_available_chips() == tpu.num_available_devices() == 0
    assert tpu.num_expected_global_devices() == tpu.num_local_processes() == 0
    assert tpu.process_bounds_size() is None and tpu.task_id() is None
    assert tpu.worker_id() == 0 and tpu.num_tpu_workers() == 1
    assert tpu.get_worker_ips() == ["localhost"] and tpu.discover_master_worker_ip()
    for function in (tpu.version, tpu.get_tpu_type, tpu.num_logical_cores_per_chip):
        with pytest.raises(OSError, match="there is no TPU: JAX runs on cpu"):
            function()
    monkeypatch.setenv("TPU_PROCESS_BOUNDS", "2,2,1")
    monkeypatch.setenv("CLOUD_TPU_TASK_ID", "3")
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "a,b")
    assert tpu.process_bounds_size() == 4 and tpu.task_id() == 3
    assert tpu.get_worker_ips() == ["a", "b"]


def test_with_a_tpu(monkeypatch):
    class Core:
        platform = "tpu"
        device_kind = "TPU v3"

        def __init__(self, n):
            self.id, self.coords, self.core_on_chip = n, (n // 2, 0, 0), n % 2

    cores = [Core(n) for n in range(8)]
    monkeypatch.setattr(jax, "local_devices", lambda: cores)
    monkeypatch.setattr(jax, "devices", lambda: cores * 2)
    assert tpu.num_available_chips() == 4 and tpu.num_available_devices() == 8
    assert tpu.num_expected_global_devices() == 16 and tpu.num_local_processes() == 1
    assert tpu.version() == 3 and tpu.get_tpu_type() == "v3"
    assert tpu.num_logical_cores_per_chip() == 2
    with pytest.raises(OSError, match="'Quantum' is no TPU"):
        tpu.tpu_type("Quantum")
    assert xenv.PJRT_DEVICE == "PJRT_DEVICE" and xenv.CPU_NUM_DEVICES == "CPU_NUM_DEVICES"
    assert xenv.TPU_MESH_CTLER_ADDR == "TPU_MESH_CONTROLLER_ADDRESS"


# --- What examples print -------------------------------------------------------------------------


class Writer:
    def __init__(self):
        self.written, self.closed = [], []

    def add_scalar(self, name, value, step):
        self.written.append((name, value, step))

    def flush(self):
        self.closed.append("flush")

    def close(self):
        self.closed.append("close")


def test_progress_lines(capsys):
    writer = Writer()
    test_utils.print_training_update(
        "jax:0", 5, torch.full((), 0.25, device="jax"), 10.0, 12.5, epoch=1, summary_writer=writer
    )
    test_utils.print_test_update("jax:0", 98.765, epoch=1)
    test_utils.print_test_update("jax:0", None)
    first, second, third = capsys.readouterr().out.splitlines()
    start = (
        "| Training Device=jax:0/0 Epoch=1 Step=5 Loss=0.25000 Rate=10.00 GlobalRate=12.50 Time="
    )
    assert re.fullmatch(re.escape(start) + r"\d\d:\d\d:\d\d", first)
    assert second.startswith("| Test Device=jax:0/0 Epoch=1 Accuracy=98.77 Time=")
    assert third.startswith("| Test Device=jax:0/0 Time=")
    assert writer.written == [("examples/sec", 10.0, None), ("average_examples/sec", 12.5, None)]
    assert re.fullmatch(r"\d{4}", test_utils.now("%Y"))


def test_summaries(tmp_path):
    met.clear_all()
    assert torch.tensor([0.0, 1.0]).to("jax").nonzero().tolist() == [[1]]
    writer = Writer()
    test_utils.write_to_summary(writer, 3, {"loss": 0.5}, write_xla_metrics=True)
    written = {name: value for name, value, step in writer.written if step == 3}
    assert written["loss"] == 0.5 and written["aten::nonzero"] == written["aten_ops_sum"] == 1
    assert written["InboundData_TotalSamples"] >= 1 and written["InboundData_Accumulator"] > 0
    test_utils.write_to_summary(None, 3, {"loss": 0.5})
    test_utils.close_summary_writer(writer)
    test_utils.close_summary_writer(None)
    assert writer.closed == ["flush", "close"]
    assert test_utils.get_summary_writer(None) is None


def test_a_summary_writer_needs_tensorboard(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError):
        test_utils.get_summary_writer(str(tmp_path))
    stand_in = type(sys)("torch.utils.tensorboard")
    stand_in.SummaryWriter = lambda log_dir: Writer()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stand_in)
    ((name, value, step),) = test_utils.get_summary_writer(str(tmp_path)).written
    assert name == "TensorboardStartTimestamp" and value > 1.6e9 and step == 0


class Cases(unittest.TestCase):
    @test_utils.mp_test
    def passes(self):
        """A method."""

    @test_utils.mp_test
    def fails(self):
        raise SystemExit(3)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*fork:RuntimeWarning")
def test_a_method_in_a_process_of_its_own():
    case = Cases("passes")
    assert case.passes() == 0
    with pytest.raises(AssertionError, match="3 != 0"):
        case.fails()
    assert Cases.passes.__doc__ == "A method."


# --- Programs as text and bytes ------------------------------------------------------------------


LISTED = "sharding={devices=[1,8]0,1,2,3,4,5,6,7}"


@pytest.fixture
def line():
    """All devices, along the second axis."""
    return xs.Mesh(range(8), (1, 8), ("x", "y"))


def test_the_program_of_what_devices_hold_gives_it_back(line):
    x = xs.mark_sharding(torch.ones(16, 16).to("jax"), line, ("x", "y"))
    text = _XLAC._get_xla_tensors_hlo([x])
    assert "f32[16,16]{1,0} parameter(0), " + LISTED in text
    xs.sync()
    assert _XLAC._get_xla_tensors_hlo([x]) == text
    assert _XLAC._get_xla_tensors_hlo([]) == ""
    text = _XLAC._get_xla_tensors_hlo([_XLAC._spmd_full_to_shard_shape(x) + 1])
    assert "f32[16,2]" in text and "LocalShape" in text


def test_the_program_after_optimisation_has_the_collectives(line, monkeypatch):
    x = xs.mark_sharding(torch.randn(1, 128).to("jax"), line, ("x", "y"))
    y = x @ torch.randn(128, 1).to("jax")
    assert "all-reduce" not in _XLAC._get_xla_tensors_hlo([y])
    monkeypatch.setenv("XLA_DUMP_POST_OPTIMIZATIONS", "1")
    assert "all-reduce" in _XLAC._get_xla_tensors_hlo([y])


def test_a_lowered_program_knows_its_parameters(line):
    xs.sync()  # so that nothing else is recorded
    a = xs.mark_sharding(torch.randn(32, 64).to("jax"), line, (None, "y"))
    b, other = torch.ones(64).to("jax"), torch.ones(3).to("jax")
    unused = other * 2  # an input of what is recorded, and not of what is asked for
    context = _XLAC.lowering.LoweringContext("my_name")
    with pytest.raises(RuntimeError, match="call build"):
        context.hlo()
    context.build([a + b])
    assert context.hlo_text().startswith("HloModule my_name,") and LISTED in context.hlo_text()
    assert b"parameter" in context.hlo()
    numbers = [context.tensor_parameter_id(one) for one in (a, b, other, unused)]
    assert numbers == [1, 2, -1, -1] and context.tensor_parameter_id(torch.ones(1)) == -1
    xs.sync()
    held = context.device_parameter_id_tensor_mapping()
    assert sorted(held) == [1, 2] and torch.equal(held[1].cpu(), a.cpu())
    assert held[1].sharding_spec == a.sharding_spec
    assert torch.equal(context.parameter_id_tensor_mapping()[2], b.cpu())
    with pytest.raises(RuntimeError, match=r"have values.*before torch_xla\.sync"):
        context.build([a])


def test_sigterm_is_a_point_to_stop_at(monkeypatch):
    _XLAC._activate_preemption_sync_manager()
    try:
        assert not any(_XLAC._sync_point_reached(step) for step in range(3))
        os.kill(os.getpid(), signal.SIGTERM)
        assert _XLAC._sync_point_reached(3)
        monkeypatch.setattr("jax.process_count", lambda: 2)
        with pytest.raises(DistributedError, match=r"CheckpointManager\.reached_preemption"):
            _XLAC._sync_point_reached(4)
    finally:
        _XLAC._deactivate_preemption_sync_manager()
    monkeypatch.undo()
    assert not preemption.sync_point_reached(5)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
