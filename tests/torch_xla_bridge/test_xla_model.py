"""core.xla_model: devices, steps, randomness, text, files."""

from __future__ import annotations

import collections
import gc
import io

import jax
import pytest
import torch
from jax.extend import mlir
from jaxlib.mlir import ir

import isoshard.torch_bridge as xs
import isoshard.torch_xla_bridge.torch_xla as torch_xla
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_xla_bridge.torch_xla.core import xla_model as xm

MESH = xs.Mesh(range(8), (2, 4), ("x", "y"))


def test_devices_and_chips():
    for arguments in ((), (1,), ("CPU",)):
        assert xm.get_xla_supported_devices(*arguments) == ["jax:0"]
    assert xm.get_xla_supported_devices("TPU") == []
    assert xm.xla_real_devices() == xm.xla_real_devices(["jax:0"]) == ["CPU:0"]
    assert xm.xla_device_hw("jax:0") == xm.xla_device_hw(xm.xla_device()) == "CPU"
    assert xm.xla_device_kind() == "cpu"
    assert xm.xla_replication_devices(["jax:0"]) == ["CPU:0"]
    xm.set_replication(xm.xla_device(), [])
    assert xm.DeviceContext("jax:0").device == "jax:0"
    assert xm.is_xla_tensor(torch.ones(1, device="jax")) and not xm.is_xla_tensor(torch.ones(1))
    with pytest.raises(RuntimeError, match=r"there is no device 'cpu'; .* CPU:0 to CPU:7"):
        xm.xla_device_hw("cpu")
    with pytest.raises(RuntimeError, match=r"replication over \['xla:0', 'xla:1'\] needs"):
        xm.set_replication("xla:0", ["xla:0", "xla:1"])


def test_there_is_one_replica(capsys):
    assert xm.get_ordinal() == xm.get_local_ordinal() == 0
    assert xm.is_master_ordinal() and xm.is_master_ordinal(local=False)
    xm.master_print("a", 1)
    assert capsys.readouterr().out == "a 1\n"
    file = io.StringIO()
    xm.master_print("b", fd=file, local=True, flush=True)
    assert file.getvalue() == "b\n"


def test_mark_step_and_waiting(counted):
    x, seen = torch.ones(3, device="jax") + 1, []
    for n in range(3):
        xm.add_step_closure(lambda v, n: seen.append((n, v.tolist())), args=(x, n))
    xm.mark_step(wait=True)
    assert counted("executions") == 1
    assert seen == [(n, [2.0] * 3) for n in range(3)]  # closures run in their order
    y = x + 1
    xm.unlazy([y, torch.ones(2)])
    assert counted("executions") == 2 and y.tolist() == [3.0] * 3
    xm.wait_device_ops(["jax:0"])


def test_an_optimizer_step_with_barrier(counted):
    parameter = torch.nn.Parameter(torch.ones(3, device="jax"))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    parameter.grad = torch.ones(3, device="jax")

    def closure():
        return torch.ones((), device="jax")

    xm.mark_step()
    before = counted("executions")
    assert xm.optimizer_step(optimizer) is None and counted("executions") == before
    loss = xm.optimizer_step(optimizer, barrier=True, optimizer_args={"closure": closure})
    assert loss.item() == 1.0 and counted("executions") == before + 1
    assert parameter.tolist() == [0.0] * 3
    xm.reduce_gradients(optimizer)
    with pytest.raises(ValueError, match=r"reduce_gradients with groups \[\[0, 1\]\] needs"):
        xm.optimizer_step(optimizer, groups=[[0, 1]])
    assert parameter.tolist() == [0.0] * 3


# --- Randomness ----------------------------------------------------------------------------------


def test_the_random_state_is_a_number():
    xm.set_rng_state(5)
    assert xm.get_rng_state() == 5
    first = torch.rand(3, device="jax")
    between = xm.get_rng_state(device="jax:0")
    second = torch.rand(3, device="jax")
    assert isinstance(between, int) and between != 5
    xm.set_rng_state(between)
    assert torch.equal(torch.rand(3, device="jax"), second)
    xm.set_rng_state(5, device="jax:0")
    assert torch.equal(torch.rand(3, device="jax"), first)
    torch.manual_seed(5)
    assert xm.get_rng_state() == 5
    xm.set_rng_state(-1)
    assert xm.get_rng_state() == 2**64 - 1


def test_fork_rng():
    xm.set_rng_state(9)
    with xm.fork_rng():
        inside = torch.rand(3, device="jax")
    assert xm.get_rng_state() == 9
    with xm.fork_rng(enabled=False):
        assert torch.equal(torch.rand(3, device="jax"), inside)
    assert xm.get_rng_state() != 9
    with pytest.raises(KeyError), xm.fork_rng():
        torch.rand(3, device="jax")
        raise KeyError
    with xm.fork_rng():
        first = torch.rand(3, device="jax")
    assert torch.equal(first, torch.rand(3, device="jax"))


# --- Memory --------------------------------------------------------------------------------------


def test_memory_of_the_cpu_is_what_jax_holds_and_of_chips_their_own_account(monkeypatch):
    gc.collect()  # what earlier tests left in cycles
    xm.mark_step(wait=True)
    before = xm.get_memory_info()
    x = torch.ones(1 << 18, device="jax") + 1
    xm.mark_step()
    after = xm.get_memory_info()
    # The step's scalars come, and those of the step before it go: some bytes either way.
    scalars = 1024
    assert abs(after["bytes_used"] - before["bytes_used"] - (4 << 18)) < scalars
    assert after["bytes_limit"] == before["bytes_limit"] > after["peak_bytes_used"] > 4 << 18
    whole = xm.get_memory_info("CPU:1")["bytes_used"]
    y = xs.mark_sharding((x + 1).detach(), MESH, (("x", "y"),))
    xm.mark_step()
    assert xm.get_memory_info("CPU:1")["bytes_used"] - whole > (4 << 15) - scalars
    del x, y
    with pytest.raises(RuntimeError, match="there is no device 'CPU:8'"):
        xm.get_memory_info("CPU:8")

    class Chip:
        platform = "tpu"

        def memory_stats(self):
            return {"bytes_in_use": 3, "bytes_limit": 100, "peak_bytes_in_use": 7}

    monkeypatch.setattr(jax, "local_devices", lambda: [Chip(), Chip()])
    found = {"bytes_used": 6, "bytes_limit": 200, "peak_bytes_used": 14}
    assert xm.get_memory_info() == found


# --- Text ----------------------------------------------------------------------------------------


def test_stablehlo_is_lowered_and_not_run(counted):
    x = xs.mark_sharding(torch.ones(8, 8).to("jax"), MESH, (0, 1))
    xm.mark_step()
    ran = counted("executions")
    y = (x @ x).relu()
    z = y + 1
    text = xm.get_stablehlo([y])
    assert "stablehlo.dot_general" in text and "stablehlo.add" not in text
    assert "8x8xf32" in text and '"x"' in text
    assert "stablehlo.add" in xm.get_stablehlo()
    assert xm.get_stablehlo_bytecode([y])[:6] == b"ML\xefR\rS"
    assert counted("executions") == ran and lazy_tensor.read(y).array is None
    torch.testing.assert_close(z.cpu(), torch.full((8, 8), 9.0))
    assert xm.get_stablehlo([y]) == "" and xm.get_stablehlo_bytecode([y]) == b""
    with pytest.raises(RuntimeError, match="a tensor on cpu has no recorded operations"):
        xm.get_stablehlo([torch.ones(2)])


def test_bytecode_may_have_custom_calls_random_numbers_and_64_bits():
    def text_of(*tensors):
        with ir.Context():
            code = xm.get_stablehlo_bytecode(list(tensors))
            return str(mlir.deserialize_portable_artifact(code))

    x = torch.rand(4, 4, device="jax")
    xm.mark_step()
    q = torch.linalg.qr(x)[0] + torch.rand(4, 4, device="jax") * 0.5
    text = text_of(q)
    assert "custom_call" in text and "4x4xf32" in text
    assert bool(q.isfinite().all())
    whole = torch.arange(4).to("jax")
    text = text_of(whole * 3 + torch.ones(4, dtype=torch.float64).to("jax") * 2.5)
    assert "%arg0: tensor<4xi64>" in text and "f32" not in text and "i32>" not in text


def test_the_hlo_of_a_tensor_lists_the_devices_of_its_layouts():
    x = xs.mark_sharding(torch.ones(8, 8).to("jax"), MESH, (1, 0))
    y = x * 2
    xs.mark_sharding(y, MESH, (0, 1))
    hlo = torch_xla._XLAC._get_xla_tensors_hlo([y])
    assert "sharding={devices=[4,2]0,4,1,5,2,6,3,7}" in hlo
    assert "sharding={devices=[2,4]0,1,2,3,4,5,6,7}" in hlo
    text = torch_xla._XLAC._get_xla_tensors_text([y])
    assert text.splitlines() == [
        "IR {",
        "  %0 = f32[8,8] input(), sharding={devices=[4,2]0,4,1,5,2,6,3,7}",
        "  %1 = aten::mul.Tensor(%0)",
        "  ROOT %2 = mark_sharding(%1), sharding={devices=[2,4]0,1,2,3,4,5,6,7}",
        "}",
    ]


def test_tensors_of_two_threads_are_no_one_program():
    import threading

    there = []
    thread = threading.Thread(target=lambda: there.append(torch.ones(2, device="jax") + 1))
    thread.start()
    thread.join()
    here = torch.ones(2, device="jax") + 1
    with pytest.raises(RuntimeError, match="recorded by several threads"):
        xm.get_stablehlo([here, there[0]])


def test_an_optimization_barrier_keeps_values_and_gradients():
    x = torch.randn(3, 2, requires_grad=True)
    ours = x.detach().to("jax").requires_grad_()
    y, z = ours.exp(), ours.sin()
    xm.optimization_barrier_([y, z])
    assert "stablehlo.optimization_barrier" in xm.get_stablehlo([y])
    (y * z).sum().backward()
    (x.exp() * x.sin()).sum().backward()
    torch.testing.assert_close(ours.grad.cpu(), x.grad)


# --- Data ----------------------------------------------------------------------------------------


Pair = collections.namedtuple("Pair", ["a", "b"])


def test_cpu_data_is_sent_to_the_device():
    t = torch.randn(8, 4)
    sent = xm.send_cpu_data_to_device({"x": t, "n": 3, "pair": Pair(t, "text")}, "jax:0")
    assert sent["n"] == 3 and sent["pair"].b == "text" and sent["pair"].a is sent["x"]
    assert isinstance(sent["pair"], Pair) and xm.is_xla_tensor(sent["x"])
    torch.testing.assert_close(sent["x"].cpu(), t)
    alone = xm.send_cpu_data_to_device(t, xm.xla_device())
    assert isinstance(alone, list) and torch.equal(alone[0].cpu(), t)
    with pytest.raises(RuntimeError, match="not to 'cuda:0'"):
        xm.send_cpu_data_to_device(t, "cuda:0")


def test_data_is_sent_with_its_layout():
    spec = xs.ShardingSpec(MESH, ("x", None))
    matrix, vector = xm.send_cpu_data_to_device([torch.ones(8, 4), torch.ones(3)], "jax", spec)
    assert matrix.sharding_spec == "{devices=[2,1,4]0,1,2,3,4,5,6,7 last_tile_dim_replicate}"
    assert vector.partition_spec is None  # the spec is for two axes
    with pytest.raises(RuntimeError, match=r"\(12, 4\) cannot be divided among the 8 devices"):
        spec = xs.ShardingSpec(MESH, (("x", "y"), None), minibatch=True)
        xm.send_cpu_data_to_device(torch.ones(12, 4), "jax", spec)


class Plain:
    def __init__(self, weight):
        self.weight = weight
        self.name = "plain"


def test_saving_moves_to_the_cpu(tmp_path):
    model = torch.nn.Linear(3, 2).to("jax")
    shared = model.weight.detach()
    data = {"state": model.state_dict(), "twice": (shared, shared), "step": 3}
    data["object"] = Plain(shared)
    xm.save(data, tmp_path / "a.pt")
    loaded = torch.load(tmp_path / "a.pt", weights_only=False)
    assert list(loaded["state"]) == ["weight", "bias"] and loaded["step"] == 3
    assert isinstance(loaded["state"], collections.OrderedDict)
    assert loaded["state"]["weight"].device.type == "cpu"
    torch.testing.assert_close(loaded["state"]["weight"], shared.cpu())
    assert loaded["twice"][0] is loaded["twice"][1]
    assert torch.equal(loaded["object"].weight, shared.cpu())
    assert data["object"].weight is shared  # the original stays as it is
    file = io.BytesIO()
    xm.save(model.state_dict(), file)
    file.seek(0)
    assert torch.equal(torch.load(file)["bias"], model.bias.detach().cpu())


def test_a_whole_module_is_saved(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).to("jax")
    xm.save(model, tmp_path / "model.pt")
    assert xm.is_xla_tensor(model[0].weight)
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    assert isinstance(again[0].weight, torch.nn.Parameter) and again[0].weight.requires_grad
    x = torch.randn(4, 3)
    torch.testing.assert_close(again(x), model(x.to("jax")).cpu())


def test_an_interrupted_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.pt"
    xm.save({"step": 1}, path)
    old, mode = path.read_bytes(), path.stat().st_mode

    class Bad:
        def __reduce__(self):
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        xm.save({"large": torch.ones(1000, device="jax"), "bad": Bad()}, path)
    assert path.read_bytes() == old and list(tmp_path.iterdir()) == [path]
    xm.save({"step": 2}, path)
    assert torch.load(path) == {"step": 2} and path.stat().st_mode == mode
    path.unlink()
    monkeypatch.setattr(jax, "process_index", lambda: 1)  # and only masters save
    xm.save({}, path, global_master=True)
    assert not path.exists()
    xm.save({}, path, master_only=False)
    xm.save({}, tmp_path / "b.pt")
    assert path.exists() and (tmp_path / "b.pt").exists()


def test_memory_that_is_shared_is_found():
    x = torch.ones(4, device="jax")
    xm.check_view_sharing([x, x, {"y": x.clone()}, torch.ones(2)])
    with pytest.raises(RuntimeError, match=r"shape \(2,\) and one of shape \(4,\) share memory"):
        xm.check_view_sharing({"a": x, "b": [x[:2]]})
    y = torch.ones(4)
    with pytest.raises(RuntimeError, match="share memory"):
        xm.check_view_sharing([y, y.view(2, 2)])


def test_an_arena_converts_all_at_once():
    calls = []

    def double(tensors):
        calls.append(len(tensors))
        return [tensor * 2 for tensor in tensors]

    arena = xm.ToXlaTensorArena(double, lambda value: isinstance(value, torch.Tensor))
    t = torch.arange(3.0)
    got = arena.transform({"a": [t, 1], "b": t + 1})
    assert calls == [2] and got["a"][0].tolist() == [0, 2, 4] and got["b"].tolist() == [2, 4, 6]
    assert arena.transform([1, 2]) == [1, 2] and calls == [2]
    with pytest.raises(ValueError, match="got 1 values and returned 0"):
        xm.ToXlaTensorArena(lambda _: [], lambda value: value == 1).transform([1])


def test_rates(monkeypatch):
    from isoshard.torch_xla_bridge.session import rates

    now = [100.0]
    monkeypatch.setattr(rates.time, "monotonic", lambda: now[0])
    tracker = xm.RateTracker(smooth_factor=0.25)
    assert tracker.rate() == tracker.global_rate() == 0.0
    now[0] += 2
    tracker.add(100)
    assert tracker.rate() == 50.0
    now[0] += 1
    tracker.add(10)
    assert tracker.global_rate() == pytest.approx(110 / 3)
    assert tracker.rate() == pytest.approx(0.75 * 10 + 0.25 * 50)
    monkeypatch.setenv("RATE_TRACKER_SMOOTHING", "0")
    tracker = xm.RateTracker()
    for count in (4.0, 8.0):
        now[0] += 1
        tracker.add(count)
        assert tracker.rate() == count
