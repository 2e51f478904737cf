"""Domain verbs and handlers on torch tensors over meshes with Explicit axes."""

import jax
import numpy as np
import pytest
import torch
from jax.sharding import AxisType, NamedSharding

import isoshard as iso
from isoshard import P
from isoshard.core.layout.uneven import padded_of

KINDS = {
    "explicit": (AxisType.Explicit, AxisType.Explicit),
    "mixed": (AxisType.Explicit, AxisType.Auto),
}
X = np.random.default_rng(0).normal(size=(18, 4)).astype(np.float32)
SIZES = ((4, 14), None)


@pytest.fixture(params=["mixed"])
def typed(request):
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=KINDS[request.param])


def layout(tensor):
    """Of the JAX array behind it."""
    return padded_of(iso.to_jax(tensor.detach())).sharding


@pytest.mark.parametrize(
    ("sizes", "typed"), [(None, "mixed"), (SIZES, "explicit")], indirect=["typed"]
)
def test_results_and_gradients_lie_on_the_users_mesh(typed, sizes):
    more = {} if sizes is None else {"uneven": "pad", "sizes": sizes}
    t = iso.shard(torch.tensor(X), typed, P("x"), **more).requires_grad_()
    found = iso.domain.cumsum(t, 0)
    found.square().sum().backward()
    wanted = X.cumsum(0)
    np.testing.assert_allclose(iso.full(found.detach()).cpu(), wanted, rtol=1e-4, atol=1e-5)
    slopes = (2 * wanted)[::-1].cumsum(0)[::-1]
    np.testing.assert_allclose(iso.full(t.grad).cpu(), slopes, rtol=1e-4, atol=1e-4)
    for tensor in (found, t.grad):
        assert layout(tensor).mesh == typed
        assert layout(tensor).is_equivalent_to(NamedSharding(typed, P("x")), 2)


def test_two_meshes_of_one_grid_are_one(typed):
    """Tensors on either type of mesh meet."""
    points = iso.shard(torch.tensor(X[:16]), typed, P("x"))
    queries = iso.shard(torch.tensor(X[:16]), iso.make_mesh((2, 4), ("x", "y")), P("x"))
    found = iso.domain.knn(points, queries, 1)
    assert found.indices[:, 0].tolist() == [*range(16)]
    assert layout(found.distances).mesh == typed
