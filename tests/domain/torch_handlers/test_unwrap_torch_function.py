"""Functions that are composed of others: looked into, as they are now, and never for ever."""

import pytest
import torch
from torch.overrides import handle_torch_function, has_torch_function

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P, make_mesh
from isoshard.torch_bridge.handlers.unwrap_torch_function import without_override_check

X = torch.arange(8.0)
FACTOR = 2


@pytest.fixture
def x():
    """Split over devices, while `torch.relu` has a handler that gives seven times as much."""
    with xs.register_function_handler(torch.relu, lambda s, x: (7 * torch.relu(x), P("x"))):
        yield iso.shard(X, make_mesh((4,), ("x",)), P("x"))


def scaled(x, *, plus=1):
    if has_torch_function((x,)):
        return handle_torch_function(scaled, (x,), x, plus=plus)
    return torch.relu(x) * FACTOR + plus


def test_what_it_calls_is_routed(x):
    assert scaled(x).tolist() == (X * 14 + 1).tolist()
    assert scaled(x, plus=0).tolist() == (X * 14).tolist()
    assert torch.nn.ReLU()(x).tolist() == (X * 7).tolist()


def test_globals_are_read_when_it_runs(x, monkeypatch):
    scaled(x)
    monkeypatch.setitem(globals(), "FACTOR", 3)
    assert scaled(x).tolist() == (X * 21 + 1).tolist()


def test_a_method_that_calls_its_own_name(x):
    assert x.unflatten(0, (4, 2)).shape == (4, 2)  # of C++, by `super()`


def test_after_an_error_it_is_looked_into_again(x):
    with pytest.raises(TypeError):
        scaled(x, plus=object())
    assert scaled(x).tolist() == (X * 14 + 1).tolist()


def test_one_that_asks_in_another_way_runs_as_ever(x):
    def asking(x):
        if torch.overrides.has_torch_function((x,)):
            return handle_torch_function(asking, (x,), x)
        return torch.relu(x)

    assert asking(x).tolist() == X.tolist()
    assert without_override_check(torch.relu)(x).tolist() == X.tolist()
