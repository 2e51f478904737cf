"""What the bridge keeps for each shape and constant is bounded, and what it keeps weakly dies."""

import gc
import importlib
import weakref

import pytest
import torch

import isoshard as iso
from isoshard.core.runtime.bounded import PROGRAMS, Bounded, Interned
from isoshard.torch_bridge import device, domain, dynamo
from isoshard.torch_bridge.dtensor import dtensor_function, meshes, routes
from isoshard.torch_bridge.interop import assume_pure, calling_jax, plain_tensors
from isoshard.torch_bridge.kernels import attention_choice
from isoshard.torch_bridge.loops import accumulating, scanning
from isoshard.torch_bridge.torch_xla.experimental.gradient_accumulation import (
    gradient_accumulation,
)
from isoshard.torch_bridge.torch_xla.experimental.scan import scan

TABLES = {
    "loops that accumulate gradients": accumulating._LOOPS,
    "choices of attention's operator": attention_choice._CHOICES,
    "empty tensors": device._EMPTY,
    "verbs on tensors": domain._KNOWN,
    "meshes of DTensors": meshes._known,
}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_tables_by_shape_are_bounded(table):
    assert type(table) in (Bounded, Interned) and 0 < table.most <= 8192


def test_functions_by_shape_are_bounded():
    assert 0 < attention_choice._gains.cache_info().maxsize <= PROGRAMS


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


def test_empty_tensors_of_shapes_without_end(monkeypatch):
    monkeypatch.setattr(device, "_EMPTY", Interned(4))
    for n in range(1, 12):
        torch.empty(n, device="jax")
    assert 2 <= len(device._EMPTY) + len(device._EMPTY.older) <= 4


def test_accumulation_over_shapes_without_end(monkeypatch):
    monkeypatch.setattr(accumulating, "_LOOPS", Interned(2))
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


def test_routes_are_forgotten_by_those_who_agreed_on_them(monkeypatch):
    monkeypatch.setattr(routes, "_kept", {})
    monkeypatch.setattr(routes, "_keys", {})
    monkeypatch.setattr(routes, "_KEPT", 3)

    def ask(*keys):
        questions = [
            routes.Question(key, f"{key}", (0,), lambda key=key: f"{key}!") for key in keys
        ]
        routes.settle(routes.TO_JAX, questions)
        return [routes.known(key) for key in keys]

    assert ask(1, 2, 3) == ["1!", "2!", "3!"]
    assert ask(4) == ["4!"] and routes.known(1) is None
    assert ask(1) == ["1!"] and routes.known(2) is None and len(routes._kept) == 3


def test_a_transform_of_lengths_without_end():
    lifted = importlib.import_module("isoshard.core.domain.fourier.fft")._lifted
    assert 0 < lifted.cache_info().maxsize <= PROGRAMS
