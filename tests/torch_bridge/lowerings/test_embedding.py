"""Embedding tables and bags against CPU torch."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import pytest
import torch
from torch.nn import functional as F

from isoshard.torch_bridge.lowerings import registry
from isoshard.torch_bridge.lowerings.cse import shared_program
from tests.torch_bridge.lowerings.harness import as_cpu, to_array, together

aten = torch.ops.aten


def table(rows: int = 7, width: int = 3) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(0))


INDICES = {
    "vector": torch.tensor([1, 1, 6, 0]),
    "matrix": torch.tensor([[1, 2, 2], [5, 2, 0]]),
    "one": torch.tensor(3),
    "none": torch.zeros(0, dtype=torch.int64),
    "int32": torch.tensor([1, 4], dtype=torch.int32),
}


def test_embeddings_and_their_gradients():
    cases = {}
    cases["halves"] = (F.embedding, INDICES["matrix"], table().bfloat16())
    every = [*itertools.product((None, 1), (False, True))]
    for number, (name, indices) in enumerate(INDICES.items()):
        chosen = every if name == "matrix" else (every[number % 4], every[-1 - number % 4])
        for padding_idx, by in chosen:
            options = {"padding_idx": padding_idx, "scale_grad_by_freq": by}
            look = lambda i, w, o=options: F.embedding(i, w, **o)  # noqa: E731
            cases[f"{name} {options}"] = (look, indices, table())
    as_cpu(cases)
    with together() as check:
        for norm_type in (1.0, 2.0):  # of the named rows only
            check(aten.embedding_renorm.default, table(), INDICES["matrix"], 0.8, norm_type)


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
        with shared_program():
            return forward(weight, indices), backward(grad, indices, 7, -1, False)

    program = jax.make_jaxpr(both)(weight, indices, grad).jaxpr
    names = [equation.primitive.name for equation in program.eqns]
    gather = program.eqns[names.index("gather")]
    scatter = program.eqns[names.index("scatter-add")]
    assert gather.invars[1] is scatter.invars[1]
    assert len(names) <= 5


def test_bags_and_their_gradients():
    """The second bag is empty; or there are no indices at all."""
    indices, offsets = torch.tensor([1, 2, 2, 5, 2, 0, 6]), torch.tensor([0, 3, 3, 5])
    cases = {}
    for mode in ("sum", "mean", "max"):
        for padding_idx, last in ((None, mode != "max"), (2, mode == "max")):
            options = {"mode": mode, "padding_idx": padding_idx, "include_last_offset": last}
            ends = torch.tensor([*offsets, 7]) if last else offsets
            bag = lambda i, e, w, s=None, o=options: F.embedding_bag(  # noqa: E731
                i, w, e, per_sample_weights=s, **o
            )
            cases[f"{options}"] = (bag, indices, ends, table())
            if mode == "sum":
                weights = torch.linspace(-1, 1, 7)
                cases[f"weighted {options}"] = (bag, indices, ends, table(), weights)
        nothing, starts = torch.tensor([], dtype=torch.int64), [0] if mode == "sum" else [0, 0]
        cases[f"nothing {mode} {starts}"] = (
            lambda i, e, w, mode=mode: F.embedding_bag(i, w, e, mode=mode),
            *(nothing, torch.tensor(starts), table()),
        )
    as_cpu(cases)
