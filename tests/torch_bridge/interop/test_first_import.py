"""Importing isoshard where torch is imported already: what follows it, and what it leaves alone."""

from __future__ import annotations

import subprocess
import sys

import pytest

BEFORE = """
import sys, jax, torch, torch.distributed as dist
is_python = hasattr(torch.autograd.Function.apply, "__func__")     # before torch 2.15
class Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1
    @staticmethod
    def backward(ctx, gradient):
        return gradient * 7
early = Turned.apply
"""
UNTOUCHED = """
import isoshard, isoshard.torch_bridge
import isoshard.torch_bridge.drop_in
assert not any("torch_bridge.torch_xla" in name for name in sys.modules)
assert "xla" not in dist.Backend.backend_list
import isoshard.torch_bridge.torch_xla as torch_xla
assert "isoshard.torch_bridge.torch_xla.runtime" not in sys.modules
assert "xla" in dist.Backend.backend_list
assert dist.Backend.default_device_backend_map["cpu"] == "gloo"
torch_xla.runtime.world_size
torch_xla.core.xla_model.mark_step
torch_xla.debug.metrics.metrics_report
torch_xla.distributed.xla_multiprocessing.spawn
torch_xla.utils.utils.timed
torch_xla.tpu.num_available_chips
torch_xla._XLAC._get_xla_sharding_spec
torch_xla.amp.autocast
assert torch.ones(1, device="jax").device.type == "jax"
assert "torch_xla" not in sys.modules

def told(kind, function):
    try:
        function()
    except kind as error:
        print(str(error).replace(chr(10), " "))

told(AttributeError, lambda: torch_xla.nothing)
told(ModuleNotFoundError, lambda: __import__("torch_xla"))
told(RuntimeError, lambda: torch.ones(1).to("xla"))
"""
FOLLOWS = """
assert jax.grad(isoshard.jax_function(lambda x: Turned.apply(x)))(1.0) == 7.0
try:
    assert jax.grad(isoshard.jax_function(early))(1.0) == 7.0
    assert is_python
except RuntimeError as error:
    assert not is_python and "Turned.apply was given another name before" in str(error)
x = torch.ones((), requires_grad=True)
early(x).backward()
assert x.grad == 7
print("it follows")
"""


@pytest.fixture(scope="module")
def said():
    """The lines of one new interpreter, as most of its time is imports."""
    done = subprocess.run(
        [sys.executable, "-c", BEFORE + UNTOUCHED + FOLLOWS],
        capture_output=True,
        text=True,
        timeout=240,
    )
    return done.stdout.splitlines(), done.stderr


def test_it_installs_nothing_and_loads_modules_when_they_are_used(said):
    lines, errors = said
    assert len(lines) >= 3, errors
    attribute, module, device = lines[:3]
    assert attribute == "module 'isoshard.torch_bridge.torch_xla' has no attribute 'nothing'"
    assert module == "No module named 'torch_xla'" and "xla" in device


def test_a_name_given_to_apply_before_follows(said):
    lines, errors = said
    assert lines[3:] == ["it follows"], errors
