"""distributed.xla_multiprocessing and distributed.xla_backend: one replica, and gloo."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from isoshard.torch_bridge.torch_xla.distributed import xla_backend
from isoshard.torch_bridge.torch_xla.distributed import xla_multiprocessing as xmp


def test_one_replica_runs_here(monkeypatch):
    seen = []
    monkeypatch.setenv("XLA_USE_SPMD", "1")
    assert xmp.spawn(lambda index, *args: seen.append((index, args)), ("a", 1)) is None
    monkeypatch.setenv("XLA_USE_SPMD", "0")
    xmp.spawn(lambda index: seen.append(index), nprocs=1, start_method="fork")
    assert seen == [(0, ("a", 1)), 0]
    with pytest.raises(NotImplementedError, match=r"there are 8 chips.*\.use_spmd\(\), mark"):
        xmp.spawn(seen.append)
    with pytest.raises(ValueError, match="4 replicas were asked for"):
        xmp.spawn(seen.append, nprocs=4)
    with pytest.raises(KeyError, match="mine"):
        xmp.spawn(lambda _: {}["mine"], nprocs=1)


def test_models_and_functions_pass_through():
    model = torch.nn.Linear(2, 2)
    assert xmp.MpModelWrapper(model).to("jax") is model
    assert model.weight.device.type == "jax"
    assert xmp.MpSerialExecutor().run(lambda: 7) == 7


def test_gradients_that_amp_recipes_fetch():
    import isoshard.torch_bridge.torch_xla.core.xla_model as xm

    a, b = (torch.nn.Parameter(torch.ones(2, device="jax")) for _ in range(2))
    optimizer = torch.optim.SGD([a, b], lr=0.1)
    (a * 3).sum().backward()
    assert [one.tolist() for one in xm._fetch_gradients(optimizer)] == [[3.0, 3.0]]


def test_several_replicas_are_refused_with_the_argument_of_each(monkeypatch):
    import isoshard.torch_bridge.torch_xla as torch_xla

    monkeypatch.delenv("XLA_USE_SPMD", raising=False)
    with pytest.raises(NotImplementedError, match="debug_single_process=True of launch"):
        torch_xla.launch(print)


@pytest.fixture
def no_group():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_group_of_gloo_meets_by_xla(no_group):
    dist.init_process_group("gloo", init_method="xla://")
    assert dist.get_world_size() == 1 and dist.get_rank() == 0
    t = torch.ones(3)
    dist.all_reduce(t)
    dist.barrier()
    gathered = [None]
    dist.all_gather_object(gathered, {"x": 1})
    assert t.tolist() == [1.0] * 3 and gathered == [{"x": 1}]
    dist.new_group([0])


def test_the_backend_xla_is_refused_with_advice(no_group):
    with pytest.raises(RuntimeError, match=r"no process group 'xla'.*\('gloo', init_method='xla:"):
        dist.init_process_group("xla", init_method="xla://")
    assert not dist.is_initialized()
    dist.init_process_group("gloo", init_method="xla://")
    assert dist.get_backend() == "gloo"


def test_several_processes_meet_at_process_0(monkeypatch):
    import jax

    made = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(dist, "TCPStore", lambda *args, **kwargs: made.append((args, kwargs)))
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.7")
    monkeypatch.setenv("MASTER_PORT", "999")
    ((_, rank, size),) = xla_backend.rendezvous_handler("xla://")
    assert (rank, size) == (1, 2) and made == [(("10.0.0.7", 999, 2, False), {})]


def test_importing_torch_xla_is_what_makes_both_known():
    code = """
import torch.distributed as dist
import isoshard.torch_bridge
assert "xla" not in dist.Backend.backend_list
import isoshard.torch_bridge.torch_xla
assert "xla" in dist.Backend.backend_list
assert dist.Backend.default_device_backend_map["cpu"] == "gloo"
"""
    subprocess.run([sys.executable, "-c", code], check=True)
