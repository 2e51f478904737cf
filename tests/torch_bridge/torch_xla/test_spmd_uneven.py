"""Axes that do not divide: taken with a warning, right in value, torch_xla's strings and pieces."""

from __future__ import annotations

import copy
import itertools
import warnings

import jax
import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as bridge
from isoshard import P, UnevenError
from isoshard.torch_bridge.spmd import UnevenWarning
from isoshard.torch_bridge.torch_xla.distributed import spmd as xs

ENTRIES = (None, "x", "y", ("x", "y"), ("y", "x"))


@pytest.fixture
def mesh():
    return xs.Mesh(range(8), (2, 4), ("x", "y"))


@pytest.fixture
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnevenWarning)
        yield


def data(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_the_warning_names_what_does_not_divide_and_is_counted(mesh, counted):
    t = data(7, 4).to("jax")
    with pytest.warns(UnevenWarning, match=r"axis 0 has size 7.*2 shards.*Pad it to 8.*whole"):
        xs.mark_sharding(t, mesh, ("x", "y"))
    assert counted("uneven_marks") == 1
    assert t.named_sharding.spec == P(None, "y")
    assert t.partition_spec == P("x", "y") and t.sharding_type == xs.ShardingType.TILED
    assert iso.to_jax(t).sharding.spec == P(None, "y")
    xs.mark_sharding(t, mesh, ("x", "y"))  # again the same: nothing to tell
    assert counted("uneven_marks") == 1


def test_the_warning_comes_once_per_line_of_user_code(mesh):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default", UnevenWarning)
        for _ in range(3):
            xs.mark_sharding(data(7).to("jax"), mesh, ("x",))
        xs.mark_sharding(data(7).to("jax"), mesh, ("x",))
    assert len(caught) == 2 and all(one.filename == __file__ for one in caught)
    assert caught[1].lineno - caught[0].lineno == 1


def test_shard_refuses(mesh):
    with pytest.raises(UnevenError, match="Pad it to 8"):
        iso.shard(data(7), mesh.get_jax_mesh(), P("x"))


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("shape", [(7, 3), (1, 9), (6, 5)])
def test_values_are_right_whatever_the_spec(shape, recorded, mesh, quiet):
    x = data(*shape)
    for spec in itertools.product(ENTRIES, ENTRIES):
        used = "".join(str(entry) for entry in spec)
        if used.count("x") > 1 or used.count("y") > 1:
            continue
        t = x.to("jax") * 1 if recorded else x.to("jax")
        xs.mark_sharding(t, mesh, spec)
        text = t.sharding_spec
        got = torch.tanh(t) @ t.t() + t.sum(1)
        torch.testing.assert_close(got.cpu(), torch.tanh(x) @ x.t() + x.sum(1))
        t.add_(1)
        assert torch.equal(t.cpu(), x + 1) and t.sharding_spec == text


def test_training_with_uneven_weights_and_activations_is_right(mesh, quiet):
    torch.manual_seed(0)
    plain = torch.nn.Sequential(
        torch.nn.Conv2d(3, 5, 3, padding=1), torch.nn.Flatten(), torch.nn.Linear(5 * 49, 3)
    )
    model = copy.deepcopy(plain).to("jax")
    xs.mark_sharding(model[0].weight, mesh, (("x", "y"), None, None, None))
    xs.mark_sharding(model[2].weight, mesh, ("x", "y"))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (plain, model)]
    x = data(6, 3, 7, 7)
    for _ in range(3):
        losses = []
        for m, optimizer, batch in zip((plain, model), optimizers, (x, x.to("jax")), strict=True):
            optimizer.zero_grad()
            h = m[0](batch)
            if batch is not x:
                xs.mark_sharding(h, mesh, ("y", None, "x", None))
            loss = m[2](m[1](torch.relu(h))).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        bridge.sync()
        torch.testing.assert_close(losses[1].cpu(), losses[0], rtol=1e-5, atol=1e-6)
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.detach().cpu(), want.detach(), rtol=1e-4, atol=1e-5)
    assert model[2].weight.sharding_spec == "{devices=[2,4]0,1,2,3,4,5,6,7}"


def test_a_value_inside_a_program_stays_whole_along_what_does_not_divide(mesh, quiet, monkeypatch):
    """XLA's partitioner may swap unequal blocks, so no such constraint reaches it."""
    asked = []
    real = jax.lax.with_sharding_constraint

    def constraint(x, shardings):
        asked.append((x.shape, shardings))
        return real(x, shardings)

    monkeypatch.setattr(jax.lax, "with_sharding_constraint", constraint)
    h = xs.mark_sharding(data(7, 8).to("jax") * 2, mesh, ("x", "y"))
    total = torch.sin(h).sum()
    torch.testing.assert_close(total.cpu(), torch.sin(data(7, 8) * 2).sum())
    assert {sharding.spec for shape, sharding in asked if shape == (7, 8)} == {P(None, "y")}


@pytest.mark.parametrize("rows", [1, 3])
def test_blocks_of_a_product_are_where_they_belong(rows, quiet):
    """Found by the fuzzer: columns 2:4 and 4:6 were exchanged."""
    mesh = iso.make_mesh((2, 2, 2), ("p", "q", "s"))
    x, w = data(rows, 8), data(8, 8)
    left = xs.mark_sharding(x.to("jax"), mesh, (("s", "p"), "q"))
    right = xs.mark_sharding(w.to("jax"), mesh, ("p", None))
    h = xs.mark_sharding(left @ right, mesh, ("p", ("s", "q")))
    torch.testing.assert_close((h * 1).cpu(), x @ w)


def test_a_deep_copy_is_marked_alike(mesh, quiet):
    t = xs.mark_sharding(data(7).to("jax"), mesh, ("y",))
    assert copy.deepcopy(t).sharding_spec == t.sharding_spec
    xs.clear_sharding(t)
    assert t.sharding_spec == "" and torch.equal(t.cpu(), data(7))


def test_a_mark_that_splits_nothing_may_be_followed_by_an_uneven_one(mesh, quiet):
    t = xs.mark_sharding(data(7).to("jax"), mesh, (None,))
    xs.mark_sharding(t, mesh, ("x",))
    assert t.partition_spec == P("x")
    with pytest.raises(ValueError, match=r"marked P\('x',\) already"):
        xs.mark_sharding(t, mesh, ("y",))


def test_out_of_place_marks_take_uneven_axes_too(mesh, quiet):
    x = data(7, 3)
    t = x.to("jax").requires_grad_()
    u = xs.mark_sharding_with_gradients(t, mesh, ("x", "y"))
    u.square().sum().backward()
    assert u.sharding_spec == "{devices=[2,4]0,1,2,3,4,5,6,7}"
    torch.testing.assert_close(t.grad.cpu(), 2 * x)
