"""NaN survives maxima and minima over an axis that is split over devices."""

import pytest
import torch

import isoshard as iso
from isoshard import P

REDUCTIONS = {
    "amax": torch.amax,
    "amin": torch.amin,
    "max": lambda x: x.max(0)[0],
    "min": lambda x: x.min(0)[0],
    "aminmax": lambda x: torch.stack(tuple(x.aminmax())),
    "norm": lambda x: torch.linalg.vector_norm(x, float("inf")),
    "smallest norm": lambda x: torch.linalg.vector_norm(x, float("-inf")),
    "foreach norm": lambda x: torch._foreach_norm([x], float("inf"))[0],
}


@pytest.mark.parametrize("place", [0, 7, 15])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_reduction_over_devices(name, place):
    mesh = iso.make_mesh((8,), ("x",))
    x = torch.arange(16.0)
    torch.testing.assert_close(
        REDUCTIONS[name](iso.shard(x, mesh, P("x"))).cpu(), REDUCTIONS[name](x)
    )
    x[place] = torch.nan
    assert REDUCTIONS[name](iso.shard(x, mesh, P("x"))).isnan().all()


@pytest.mark.parametrize("reduce", ["amax", "amin"])
def test_a_scatter_over_devices(reduce):
    mesh = iso.make_mesh((2, 4), ("x", "y"))
    torch.manual_seed(0)
    source = torch.randn(16, 4)
    source[3, 1] = source[9, 2] = torch.nan
    index = torch.randint(0, 8, (16, 4))
    want = torch.zeros(8, 4).scatter_reduce(0, index, source, reduce)
    got = (
        torch.zeros(8, 4)
        .to("jax")
        .scatter_reduce(0, index.to("jax"), iso.shard(source, mesh, P(("x", "y"))), reduce)
    )
    torch.testing.assert_close(got.cpu(), want, equal_nan=True)
    assert want.isnan().sum() == 2
