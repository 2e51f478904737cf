"""Programs as text and bytes, by torch_xla's names, and what stops a script."""

from __future__ import annotations

import os
import signal

import pytest
import torch

import isoshard.torch_bridge as xs
from isoshard.core.errors import DistributedError
from isoshard.torch_bridge.checkpoints import preemption
from isoshard.torch_bridge.torch_xla import _XLAC

LISTED = "sharding={devices=[1,8]0,1,2,3,4,5,6,7}"


@pytest.fixture
def mesh():
    """All devices, along the second axis."""
    return xs.Mesh(range(8), (1, 8), ("x", "y"))


def test_the_program_of_what_devices_hold_gives_it_back(mesh):
    x = xs.mark_sharding(torch.ones(16, 16).to("jax"), mesh, ("x", "y"))
    text = _XLAC._get_xla_tensors_hlo([x])
    assert "f32[16,16]{1,0} parameter(0), " + LISTED in text
    xs.sync()
    assert _XLAC._get_xla_tensors_hlo([x]) == text
    assert _XLAC._get_xla_tensors_hlo([]) == ""


def test_the_program_after_optimisation_has_the_collectives(mesh, monkeypatch):
    x = xs.mark_sharding(torch.randn(1, 128).to("jax"), mesh, ("x", "y"))
    y = x @ torch.randn(128, 1).to("jax")
    assert "all-reduce" not in _XLAC._get_xla_tensors_hlo([y])
    monkeypatch.setenv("XLA_DUMP_POST_OPTIMIZATIONS", "1")
    assert "all-reduce" in _XLAC._get_xla_tensors_hlo([y])


def test_the_program_of_pieces(mesh):
    x = xs.mark_sharding(torch.ones(8, 8).to("jax"), mesh, ("x", "y"))
    piece = _XLAC._spmd_full_to_shard_shape(x)
    text = _XLAC._get_xla_tensors_hlo([piece + 1])
    assert "f32[8,1]" in text and "LocalShape" in text


def test_a_lowered_program_knows_its_parameters(mesh):
    xs.sync()  # so that nothing else is recorded
    a = xs.mark_sharding(torch.randn(32, 64).to("jax"), mesh, (None, "y"))
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


def test_the_one_device_is_found_by_the_kind_of_its_chips():
    devices = xs.get_xla_supported_devices()
    assert xs.get_xla_supported_devices("CPU") == devices == ["jax:0"]
    assert xs.get_xla_supported_devices("TPU") == []


def test_an_uneven_minibatch_is_told_in_torch_xlas_words_too(mesh):
    from isoshard.torch_bridge.torch_xla.distributed.parallel_loader import MpDeviceLoader

    spec = xs.ShardingSpec(xs.get_1d_mesh("x"), ("x", None), minibatch=True)
    loader = MpDeviceLoader([torch.zeros(7, 3)], "jax:0", input_sharding=spec)
    words = r"When minibatch is configured, .* shape: \(7, 3\); a batch of 7 rows does not split"
    with pytest.raises(RuntimeError, match=words):
        next(iter(loader))
