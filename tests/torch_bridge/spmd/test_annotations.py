"""Marks hold: through writes, training and views."""

from __future__ import annotations

import jax
import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P
from tests.torch_bridge.engine.test_sync import batch, mlp, train_step


@pytest.fixture
def grid() -> xs.Mesh:
    """The mesh of torch_xla's users."""
    return xs.Mesh(range(8), (2, 4), ("x", "y"))


# --- Annotations ---------------------------------------------------------------------------------


def spec(t: torch.Tensor) -> tuple:
    return tuple(t.partition_spec)


def real_spec(t: torch.Tensor) -> jax.sharding.Sharding:
    """The layout of the buffers, whatever the annotation says."""
    return iso.to_jax(t.detach()).sharding.spec


IN_PLACE = {
    "add_": lambda t: t.add_(1),
    "copy_": lambda t: t.copy_(torch.ones(8, 4, device="jax")),
    "copy_ from cpu": lambda t: t.copy_(torch.ones(8, 4)),
    "fill_": lambda t: t.fill_(3),
    "zero_": lambda t: t.zero_(),
    "setitem": lambda t: t.__setitem__(0, 5.0),
    "through a view": lambda t: t.t()[1].mul_(2),
    "masked_fill_": lambda t: t.masked_fill_(t > 0, 2.0),
    "uniform_": lambda t: t.uniform_(),
    "init": lambda t: torch.nn.init.xavier_uniform_(t),
    "product": lambda t: t.copy_(t.t().contiguous().t() @ torch.ones(4, 4, device="jax")),
}


@pytest.mark.parametrize("synced", [True, False])
def test_an_annotation_survives_in_place_updates(synced, grid):
    marked = {
        name: xs.mark_sharding(torch.ones(8, 4).to("jax"), grid, ("y", "x")) for name in IN_PLACE
    }
    if synced:
        xs.sync()
    for _ in range(2):
        for name, t in marked.items():
            IN_PLACE[name](t)
        xs.sync()
        for name, t in marked.items():
            assert spec(t) == ("y", "x"), name
            assert real_spec(t) == P("y", "x"), name


def test_a_parameters_layout_survives_training_and_its_state_follows(grid):
    model = mlp().to("jax")
    xs.mark_sharding(model[0].weight, grid, ("y", None))
    xs.mark_sharding(model[2].weight, grid, (None, 1))
    xs.mark_sharding(model[0].bias, grid, ("y",))
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    x, y = (t.to("jax") for t in batch())
    for _ in range(3):
        train_step(model, optimizer, xs.mark_sharding(x.clone(), grid, ("x", None)), y)
        xs.sync()
    for parameter, want in ((model[0].weight, P("y")), (model[2].weight, P(None, "y"))):
        state = optimizer.state[parameter]
        assert parameter.is_leaf and isinstance(parameter, torch.nn.Parameter)
        assert real_spec(parameter) == want
        assert [real_spec(state[k]) for k in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")] == [
            want
        ] * 3


class Marked(torch.nn.Module):
    """A model that marks its activation, as SPMD scripts do."""

    def __init__(self, mesh: xs.Mesh):
        super().__init__()
        self.inner = mlp()
        self.mesh = mesh
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner[0](x)
        xs.mark_sharding(h, self.mesh, ("x", "y"))
        self.seen.append(h.detach())
        return self.inner[2](torch.tanh(h))


def test_activations_can_be_marked_inside_forward(grid):
    model, (x, y) = Marked(grid), batch()
    plain = mlp()
    model.to("jax")
    torch.nn.functional.mse_loss(model(x.to("jax")), y.to("jax")).backward()
    torch.nn.functional.mse_loss(plain(x), y).backward()
    xs.sync()
    assert spec(model.seen[0]) == ("x", "y")
    assert real_spec(model.seen[0]) == P("x", "y")
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad.cpu(), want.grad)


def test_a_view_can_be_marked(grid):
    x = torch.arange(64.0).to("jax").reshape(8, 8)
    base = x + 1
    view = xs.mark_sharding(base.t(), grid, ("x", "y"))
    assert torch.equal(view.cpu(), (torch.arange(64.0).reshape(8, 8) + 1).t())
    view.mul_(2)
    assert torch.equal(base.cpu(), (torch.arange(64.0).reshape(8, 8) + 1) * 2)


def test_heads_of_attention_can_be_marked(grid):
    """What tensor-parallel scripts do: a reshaped and transposed activation is marked."""
    x = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(0))
    h = x.to("jax").mul(1.0).view(2, 8, 4, 8).transpose(1, 2)
    xs.mark_sharding(h, grid, (None, "y", None, None))
    out = torch.softmax(h @ h.transpose(-1, -2), -1) @ h
    want = x.view(2, 8, 4, 8).transpose(1, 2)
    want = torch.softmax(want @ want.transpose(-1, -2), -1) @ want
    torch.testing.assert_close(out.cpu(), want)


def test_results_are_laid_out_by_the_partitioner(grid):
    x = xs.mark_sharding(torch.ones(8, 4).to("jax"), grid, ("x", None))
    w = xs.mark_sharding(torch.ones(4, 8).to("jax"), grid, (None, "y"))
    product = x @ w
    xs.sync()
    assert real_spec(product) == P("x", "y")
    assert spec(product) == ("x", "y")


GRADIENTS = {
    "sum over the split axis": lambda x: x.sum(0),
    "sum": lambda x: x.sum(),
    "product": lambda x: (x * 2).sum(),
    "matrix product": lambda x: (x @ x.detach()).sum(),
}


@pytest.mark.parametrize("spec", [P("x"), P(None, "y"), P()])
def test_autograd_grad_lays_gradients_out_as_leaves(mesh, spec):
    """As `.backward()` does; values and shapes are torch's."""
    rows = torch.arange(64.0).reshape(8, 8)
    for name, function in GRADIENTS.items():
        want_leaf = rows.clone().requires_grad_()
        want_y = function(want_leaf)
        [want] = torch.autograd.grad(want_y, want_leaf, grad_outputs=torch.ones_like(want_y) * 3)
        x = iso.shard(rows, mesh, spec).requires_grad_()
        y = function(x)
        [got] = torch.autograd.grad(y, x, grad_outputs=torch.ones_like(y) * 3)
        xs.sync()
        if spec != P():
            assert iso.to_jax(got).sharding.spec == spec, name
        torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0)
    other = torch.ones(3, requires_grad=True)
    y = x.sum().cpu() + other.sum()
    got = torch.autograd.grad(y, [x, other, torch.ones(1, requires_grad=True)], allow_unused=True)
    assert [one is None for one in got] == [False, False, True]
    try:  # torch 2.13 and later take a dictionary
        named = torch.autograd.grad((x * 2).sum(), {"x": x})
    except TypeError:
        return
    assert named["x"].tolist() == torch.full((8, 8), 2.0).tolist()
