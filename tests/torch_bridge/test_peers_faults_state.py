"""More behaviour that bridges between torch and XLA are known to get wrong without a word.

Random numbers, state that a step changes, saving, errors, and layouts; views and promotion are in
`test_peers_faults`.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P
from tests.torch_bridge.on_both import same
from tests.torch_bridge.training.test_training import close, draw

functional = torch.nn.functional
Case = Callable[[torch.Tensor], Any]
# One small program on many layouts, on purpose.
pytestmark = pytest.mark.filterwarnings("ignore::isoshard.core.errors.RecompilationWarning")


# --- Random numbers ------------------------------------------------------------------------------


DRAWS: dict[str, Case] = {
    "exponential_": lambda x: x.exponential_(),
    "dropout": lambda x: functional.dropout(torch.ones_like(x), 0.5),
    "randperm": lambda x: torch.randperm(64, device=x.device),
}


def test_no_two_draws_are_alike_and_none_depends_on_the_mesh(mesh):
    """Every call draws anew; the shards of one tensor do not repeat each other's numbers."""

    def twice(make: Callable[[], torch.Tensor]) -> dict[str, list[torch.Tensor]]:
        torch.manual_seed(0)
        found: dict[str, list[torch.Tensor]] = {name: [] for name in DRAWS}
        for _ in range(2):  # by one program
            for name, one in {name: case(make()) for name, case in DRAWS.items()}.items():
                found[name].append(one.cpu())
        return found

    plain = twice(lambda: torch.zeros(64, device="jax"))
    sharded = twice(lambda: iso.shard(torch.zeros(64), mesh, P(("x", "y"))))
    for name, (first, second) in plain.items():
        assert not torch.equal(first, second), name
        assert torch.equal(sharded[name][0], first) and torch.equal(sharded[name][1], second), name
        eighths = first.chunk(8)
        assert any(not torch.equal(eighths[0], other) for other in eighths[1:]), name


# --- Saving --------------------------------------------------------------------------------------


def test_saving_loading_copying_and_pickling(mesh):
    """Tensors, modules and state dictionaries survive each of Python's and torch's ways."""
    model = iso.shard(torch.nn.Linear(8, 8), mesh, P())
    x = iso.shard(draw(8, 8), mesh, P("x", "y"))
    for thing in (x, x[1:, ::2], x.t(), torch.ones(3, device="jax")):
        file = io.BytesIO()
        torch.save(thing, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        assert torch.equal(loaded.cpu(), thing.cpu())
        assert torch.equal(pickle.loads(pickle.dumps(thing)).cpu(), thing.cpu())
        assert torch.equal(copy.deepcopy(thing).cpu(), thing.cpu())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.weight.zero_()
    assert model.weight.count_nonzero().item() > 0
    assert isinstance(twin.weight, torch.nn.Parameter)
    restored = pickle.loads(pickle.dumps(model))
    assert torch.equal(restored.weight.cpu(), model.weight.cpu())


# --- Errors --------------------------------------------------------------------------------------


class Failing(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        raise LookupError("in backward")


def _raise(*_: Any) -> None:
    raise LookupError("in a hook")


def _hooked(x: torch.Tensor) -> None:
    y = x * 2
    y.register_hook(_raise)
    y.sum().backward()


def _hooked_module(x: torch.Tensor) -> None:
    layer = torch.nn.Linear(4, 4).to("jax")
    layer.register_full_backward_hook(_raise)
    checkpoint(layer, x, use_reentrant=False).sum().backward()


def _node_hook(x: torch.Tensor) -> None:
    y = x.sin()
    y.grad_fn.register_prehook(_raise)
    y.sum().backward()


ERRORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "backward": lambda x: Failing.apply(x).sum().backward(),
    "checkpoint": lambda x: checkpoint(Failing.apply, x, use_reentrant=True).sum().backward(),
    "hook": _hooked,
    "module hook": _hooked_module,
    "node hook": _node_hook,
    "compiled": lambda x: xs.compile(lambda a: Failing.apply(a).sum().backward())(x),
    "vmap": lambda x: torch.autograd.functional.jacobian(Failing.apply, x, vectorize=False),
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_in_backward_or_in_a_hook_reaches_the_user(name):
    x = draw(3, 4).to("jax").requires_grad_()
    with pytest.raises(LookupError, match=r"in backward|in a hook"):
        ERRORS[name](x)
    fresh = draw(3, 4).to("jax").requires_grad_()
    fresh.square().sum().backward()
    close(fresh.grad, 2 * draw(3, 4))


# --- Uneven shapes and spatial layouts -----------------------------------------------------------


def test_reductions_over_a_split_axis_are_whole(mesh):
    """`item` of a reduction is that of the whole, and so is what scans, flips and sorts give."""

    def program(a: torch.Tensor, b: torch.Tensor) -> Any:
        reduced = [a.sum(), a.max(), a.var(), a.std(), a.softmax(0), a.cumsum(0)]
        return [*reduced, a.flip(0), a.roll(3), a[1:][:5].sort()[0], b.reshape(16, 4)]

    for size, spec in ((8, P(("x", "y"))), (16, P("y"))):
        data = torch.arange(float(size)), draw(2, 8, 4)
        x, y = iso.shard(data[0], mesh, spec), iso.shard(data[1], mesh, P(None, "y", None))
        same(program(x, y), program(*data), atol=1e-5)
