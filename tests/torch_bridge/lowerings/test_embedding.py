"""Embedding tables and bags against CPU torch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from isoshard.torch_bridge.lowerings import registry
from isoshard.torch_bridge.lowerings.cse import one_program
from tests.torch_bridge.lowerings.harness import check, evaluate, to_array

aten = torch.ops.aten
SUM, MEAN, MAX = 0, 1, 2


def table(rows: int = 7, width: int = 3) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(rows, width)


INDICES = {
    "vector": torch.tensor([1, 1, 6, 0]),
    "matrix": torch.tensor([[1, 2, 2], [5, 2, 0]]),
    "one": torch.tensor(3),
    "none": torch.zeros(0, dtype=torch.int64),
    "int32": torch.tensor([1, 4], dtype=torch.int32),
}


@pytest.mark.parametrize("name", INDICES)
def test_embedding(name):
    check(aten.embedding.default, table(), INDICES[name])
    check(aten.embedding.default, table().bfloat16(), INDICES[name])


@pytest.mark.parametrize("padding_idx", [-1, 1])
@pytest.mark.parametrize("by_frequency", [False, True])
@pytest.mark.parametrize("name", INDICES)
def test_backward(name, padding_idx, by_frequency):
    indices = INDICES[name]
    grad = torch.randn(*indices.shape, 3)
    check(aten.embedding_dense_backward.default, grad, indices, 7, padding_idx, by_frequency)


@pytest.mark.parametrize("index", [3, -1])
def test_index_outside_the_table_gives_nan_and_adds_to_no_row(index):
    function = registry.find(aten.embedding.default).function
    assert jnp.isnan(function(jnp.ones((3, 2)), jnp.array([index]))).all()
    backward = registry.find(aten.embedding_dense_backward.default).function
    assert not backward(jnp.ones((1, 2)), jnp.array([index]), 3, -1, False).any()


def test_forward_and_backward_are_a_gather_and_a_scatter_at_the_same_places():
    """Of one program, they share the places, which a mesh then moves once."""
    weight, indices, grad = to_array(table()), to_array(INDICES["vector"]), jnp.ones((4, 3))
    forward = registry.find(aten.embedding.default).function
    backward = registry.find(aten.embedding_dense_backward.default).function

    def both(weight, indices, grad):
        with one_program():
            return forward(weight, indices), backward(grad, indices, 7, -1, False)

    program = jax.make_jaxpr(both)(weight, indices, grad).jaxpr
    names = [equation.primitive.name for equation in program.eqns]
    gather = program.eqns[names.index("gather")]
    scatter = program.eqns[names.index("scatter-add")]
    assert gather.invars[1] is scatter.invars[1]
    assert len(names) <= 5


@pytest.mark.parametrize("norm_type", [1.0, 2.0])
def test_renorm_touches_the_named_rows_only(norm_type):
    check(aten.embedding_renorm.default, table(), INDICES["matrix"], 0.8, norm_type)


# Bags

BAG_INDICES = torch.tensor([1, 2, 2, 5, 2, 0, 6])


def bag_results(mode, *, weights=None, last=False, padding_idx=-1, offsets=(0, 3, 3, 5)):
    """Our results and torch's, which leaves some of its bookkeeping empty on the CPU."""
    offsets = torch.tensor([*offsets, 7] if last else offsets)
    arguments = (table(), BAG_INDICES, offsets, False, mode, False, weights, last, padding_idx)
    return evaluate(aten._embedding_bag.default, *arguments), aten._embedding_bag(*arguments)


@pytest.mark.parametrize("padding_idx", [-1, 2])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("mode", [SUM, MEAN, MAX])
def test_bag(mode, last, padding_idx):
    """The second bag is empty."""
    got, want = bag_results(mode, last=last, padding_idx=padding_idx)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got[1], [0, 0, 0, 2, 2, 3, 3])
    assert got[2].shape == (5 if last else 4,)


def test_weighted_bag():
    got, want = bag_results(SUM, weights=torch.linspace(-1, 1, 7))
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("padding_idx", [-1, 2])
@pytest.mark.parametrize("mode", [SUM, MEAN, MAX])
@pytest.mark.parametrize("weighted", [False, True])
def test_bag_backward(mode, padding_idx, weighted):
    """Through our own forward's bookkeeping, as autograd hands it on."""
    if weighted and mode != SUM:
        return
    weights = torch.linspace(-1, 1, 7) if weighted else None
    offsets = torch.tensor([0, 3, 3, 5])
    weight = table().requires_grad_()
    out = torch.nn.functional.embedding_bag(
        BAG_INDICES,
        weight,
        offsets,
        mode=("sum", "mean", "max")[mode],
        per_sample_weights=weights,
        padding_idx=None if padding_idx < 0 else padding_idx,
    )
    grad = torch.randn_like(out)
    (want,) = torch.autograd.grad(out, weight, grad)
    saved = [torch.tensor(np.asarray(x)) for x in bag_results(mode, weights=weights,
             padding_idx=padding_idx)[0][1:]]  # fmt: skip
    (got,) = evaluate(
        aten._embedding_bag_backward.default,
        grad, BAG_INDICES, offsets, *saved, 7, False, mode, False, weights, padding_idx,
    )  # fmt: skip
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("padding_idx", [-1, 2])
def test_gradient_of_sample_weights(padding_idx):
    weights = torch.linspace(-1, 1, 7).requires_grad_()
    offsets = torch.tensor([0, 3, 3, 5])
    out = torch.nn.functional.embedding_bag(
        BAG_INDICES,
        table(),
        offsets,
        mode="sum",
        per_sample_weights=weights,
        padding_idx=None if padding_idx < 0 else padding_idx,
    )
    grad = torch.randn_like(out)
    (want,) = torch.autograd.grad(out, weights, grad)
    bags = torch.tensor([0, 0, 0, 2, 2, 3, 3])
    (got,) = evaluate(
        aten._embedding_bag_per_sample_weights_backward.default,
        grad, table(), BAG_INDICES, offsets, bags, SUM, padding_idx,
    )  # fmt: skip
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ("sum", "mean", "max"))
def test_bags_of_no_indices(mode):
    table = torch.randn(4, 3)
    for offsets in ([0], [0, 0]):
        outs = []
        for device in ("cpu", "jax"):
            weight = table.clone().to(device).requires_grad_()
            indices = torch.tensor([], dtype=torch.int64, device=device)
            out = torch.nn.functional.embedding_bag(
                indices, weight, torch.tensor(offsets, device=device), mode=mode
            )
            out.sum().backward()
            outs.append((out.detach().cpu(), weight.grad.cpu()))
        assert torch.equal(outs[0][0], outs[1][0]) and torch.equal(outs[0][1], outs[1][1])
