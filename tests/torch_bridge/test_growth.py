"""What the bridge keeps for each shape and constant is bounded, and what it keeps weakly dies."""

import gc
import weakref

import pytest
import torch

import isoshard as iso
from isoshard.core.runtime.caches import Bounded, Interned
from isoshard.torch_bridge.dynamo import dynamo
from isoshard.torch_bridge.interop import assume_pure, calling_jax, dtensor_function, plain_tensors
from isoshard.torch_bridge.loops import accumulating, scanning
from isoshard.torch_xla_bridge.torch_xla.experimental.gradient_accumulation import (
    gradient_accumulation,
)
from isoshard.torch_xla_bridge.torch_xla.experimental.scan import scan


@pytest.fixture
def few(monkeypatch):
    """The same, with a bound that a test can reach."""
    for module in (calling_jax, plain_tensors, assume_pure, dtensor_function, dynamo):
        monkeypatch.setattr(module, "PROGRAMS", 3)


def test_a_function_forgets_constants_it_was_called_with(few):
    doubled = iso.torch_function(lambda x, n: x * n)
    on_device, on_host = torch.ones(2, device="jax"), torch.ones(2)
    for n in [*range(8), 0]:
        assert doubled(on_device, n).tolist() == [n, n]
        assert doubled(on_host, n).tolist() == [n, n]
    tables = [one for one in gc.get_objects() if type(one) is Bounded and one.most == 3]
    assert tables and all(len(table) <= 3 for table in tables)


def test_accumulation_over_shapes_without_end(monkeypatch):
    monkeypatch.setattr(accumulating, "_LOOPS", Interned(2, "test"))
    model = torch.nn.Linear(2, 1, bias=False).to("jax")
    for n in [1, 2, 3, 4, 1]:
        model.zero_grad()
        batches = torch.ones(3, n, 2, device="jax")
        loss = gradient_accumulation(lambda x: model(x).sum(), (batches,), model)
        assert loss.item() == pytest.approx(n * model.weight.sum().item(), abs=1e-5)
        assert model.weight.grad.tolist() == [[n, n]]
    assert len(accumulating._LOOPS) + len(accumulating._LOOPS.older) == 2


def test_a_scanned_module_dies_though_it_was_remembered():
    class Step(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2, device="jax"))
            self.itself = [self]

        def forward(self, carry, x):
            new = carry * self.weight + x
            return new, new

    step = Step()
    for _ in range(2):
        last, _ = scan(step, torch.zeros(2, device="jax"), torch.ones(3, 2, device="jax"),
                       is_fn_pure=True)  # fmt: skip
        assert last.tolist() == [3.0, 3.0]
    assert step in scanning._PURE
    alive, entries = weakref.ref(step), len(scanning._PURE)
    del step, last
    gc.collect()
    assert alive() is None and len(scanning._PURE) == entries - 1
