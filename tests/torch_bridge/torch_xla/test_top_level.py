"""torch_xla's top-level functions: devices, sync, step, compile, launch."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import isoshard.torch_bridge as xs
import isoshard.torch_bridge.torch_xla as torch_xla
from isoshard.core.runtime import metrics
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.torch_xla.core import xla_model as xm


def is_executed(tensor: torch.Tensor) -> bool:
    assert isinstance(tensor, lazy_tensor.LazyTensor)
    return lazy_tensor.read(tensor).array is not None


@pytest.fixture
def plain(monkeypatch):
    """Not in SPMD mode."""
    monkeypatch.setenv("XLA_USE_SPMD", "0")


@pytest.fixture
def spmd(monkeypatch):
    monkeypatch.setenv("XLA_USE_SPMD", "1")


def test_devices(plain):
    assert torch_xla.device() == torch_xla.device(0) == torch.device("jax", 0)
    assert torch_xla.devices() == [torch_xla.device()]
    assert torch_xla.real_devices() == [f"CPU:{n}" for n in range(8)]
    assert torch_xla.device_count() == 8
    assert torch.ones(2, device=torch_xla.device()).device == torch_xla.device()
    with pytest.raises(IndexError, match=r"one logical device, jax:0, and 3 was asked for"):
        torch_xla.device(3)


def test_in_spmd_mode_every_number_is_the_device(spmd):
    assert torch_xla.device(3) == torch_xla.device()


def test_the_version_says_whose_it_is():
    assert torch_xla.__version__.startswith("2.9") and "isoshard" in torch_xla.__version__


def test_modules_are_attributes_without_being_imported():
    code = """
import sys
import isoshard.torch_bridge
assert not any("torch_bridge.torch_xla" in name for name in sys.modules)
import isoshard.torch_bridge.torch_xla as torch_xla
assert "isoshard.torch_bridge.torch_xla.runtime" not in sys.modules
torch_xla.runtime.world_size
torch_xla.core.xla_model.mark_step
torch_xla.debug.metrics.metrics_report
torch_xla.distributed.xla_multiprocessing.spawn
torch_xla.utils.utils.timed
torch_xla.tpu.num_available_chips
torch_xla._XLAC._get_xla_sharding_spec
torch_xla.amp.autocast
try:
    torch_xla.nothing
except AttributeError as error:
    print(error)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == (
        "module 'isoshard.torch_bridge.torch_xla' has no attribute 'nothing'"
    )


def test_sync_executes_and_runs_closures():
    x = torch.ones(3, device="jax") * 2
    seen = []
    xm.add_step_closure(lambda value: seen.append(value.sum().item()), args=(x,))
    assert not is_executed(x) and not seen
    torch_xla.sync()
    assert is_executed(x) and seen == [6.0]
    torch_xla.sync(wait=True, reset_scope=False)
    assert seen == [6.0]


def test_the_environment_makes_sync_wait(monkeypatch):
    from isoshard.torch_bridge import runtime

    waits = []
    monkeypatch.setattr(runtime, "sync", lambda *, wait: waits.append(wait))
    torch_xla.sync()
    torch_xla.sync(wait=True)
    monkeypatch.setenv("XLA_SYNC_WAIT", "1")
    torch_xla.sync()
    assert waits == [False, True, True]


def test_step_separates_programs(counted):
    x = torch.ones(3, device="jax") + 5
    with torch_xla.step():
        assert is_executed(x)
        y = x * 2
        assert not is_executed(y)
    assert is_executed(y)
    assert counted("executions") == 2
    torch.testing.assert_close(y.cpu(), torch.full((3,), 12.0))


def test_step_ends_with_sync_also_after_an_error():
    x = torch.ones(3, device="jax")
    kept = []
    with pytest.raises(KeyError, match="mine"):
        with torch_xla.step():
            kept.append(x + 1)
            raise KeyError("mine")
    assert is_executed(kept[0])


@pytest.mark.parametrize("form", ["call", "decorator", "decorator with arguments", "module"])
def test_compile_runs_a_function_as_one_program(form, counted):
    def function(x):
        """Doubles."""
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


def test_compile_runs_python_in_every_call():
    calls = []

    @torch_xla.compile
    def function(x):
        calls.append(len(calls))
        return x + len(calls)

    x = torch.zeros(1, device="jax")
    assert [function(x).item() for _ in range(3)] == [1.0, 2.0, 3.0]


def test_a_training_step_in_compile_is_as_without():
    def train(wrap):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2).to("jax")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        x = torch.arange(12.0).reshape(3, 4).to("jax")
        run = wrap(step)
        return [run(x).item() for _ in range(4)]

    plain = train(lambda step: step)
    assert train(torch_xla.compile) == pytest.approx(plain, rel=1e-6)
    assert plain[0] > plain[-1]


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


def test_full_graph_allows_reading_what_is_there():
    @torch_xla.compile(full_graph=True)
    def scaled(x, factor):
        return x * factor.item()

    factor = torch.full((), 3.0, device="jax") * 2
    assert scaled(torch.ones(2, device="jax"), factor).tolist() == [6.0, 6.0]


def test_too_many_graphs_are_refused():
    compiled = torch_xla.compile(lambda x: x + 1, name="grows", max_different_graphs=2)
    for size in (3, 4, 3, 4):
        assert compiled(torch.ones(size, device="jax")).tolist() == [2.0] * size
    with pytest.raises(RuntimeError, match=r"grows records another program, and max_diff.*=2"):
        compiled(torch.ones(5, device="jax"))
    assert compiled(torch.ones(3, device="jax")).tolist() == [2.0] * 3
    other = torch_xla.compile(lambda x: x + 1, max_different_graphs=1)
    assert other(torch.ones(5, device="jax")).tolist() == [2.0] * 5
    with pytest.raises(ValueError, match="1 or more"):
        torch_xla.compile(max_different_graphs=0)


def test_a_learning_rate_makes_no_other_graph():
    parameter = torch.nn.Parameter(torch.ones(3, device="jax"))
    optimizer = torch.optim.SGD([parameter], lr=0.1)

    @torch_xla.compile(max_different_graphs=1)
    def step():
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    for rate in (0.1, 0.2, 0.3):
        optimizer.param_groups[0]["lr"] = rate
        step()
    torch.testing.assert_close(parameter.detach().cpu(), torch.full((3,), 0.4))


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


def test_the_name_is_reported(counted):
    torch_xla.compile(lambda x: (x + 7).cos().tan(), name="my step")(torch.ones(11, device="jax"))
    assert any(c.what.endswith("operations of my step") for c in metrics.compilations())


def test_manual_seed():
    torch_xla.manual_seed(3)
    first = torch.rand(4, device="jax")
    torch_xla.manual_seed(3, device="jax:0")
    assert torch.equal(first, torch.rand(4, device="jax"))
    assert not torch.equal(first, torch.rand(4, device="jax"))
    with pytest.raises(RuntimeError, match="is no device here"):
        torch_xla.manual_seed(3, device="TPU:0")


def test_launch_is_for_replicas(spmd):
    with pytest.raises(NotImplementedError, match=r"an SPMD script is one: call main\(0, \*args\)"):

        def main(index):
            raise AssertionError

        torch_xla.launch(main)


def test_launch_of_one_replica(plain):
    seen = []
    torch_xla.launch(lambda index, name: seen.append((index, name)), ("x",), "fork", True)
    assert seen == [(0, "x")]
    with pytest.raises(NotImplementedError, match=r"there are 8 chips, and so many replicas"):
        torch_xla.launch(print)


def test_xs_names_are_the_same():
    assert xs.xla_device is xm.xla_device
    assert xs.get_xla_supported_devices is xm.get_xla_supported_devices
