"""Writes at one place are right on every layout of what is written to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import isoshard as iso
from isoshard import P
from isoshard.torch_bridge.lowerings.partition import compiling_for
from isoshard.torch_bridge.lowerings.single import put, write

X = torch.randn(2, 8, 3, 8, generator=torch.Generator().manual_seed(0))
MASK = X[:, 0] > 0
AT = torch.tensor([0])
WRITES = {
    "a selection": lambda x, at: x[..., 5].fill_(-1),
    "a slice": lambda x, at: x[..., 0:1].fill_(-1),
    "a slice with a step": lambda x, at: x[..., 1::9].fill_(-1),
    "index_copy": lambda x, at: x.index_copy_(-1, at, x.new_full((2, 8, 3, 1), -1)),
    "index_add": lambda x, at: x.index_add_(-1, at, x.new_full((2, 8, 3, 1), -1)),
    "index_fill": lambda x, at: x.index_fill_(-1, at, -1),
    "index_reduce": lambda x, at: x.index_reduce_(-1, at, x.new_full((2, 8, 3, 1), -1), "amin"),
    "index_put": lambda x, at: x.index_put_((at, at + 3, at, at - 2), x.new_full((1,), -1)),
    "index_put between": lambda x, at: x[:, at, :, at].fill_(-1),
    "scatter": lambda x, at: x.scatter_(-1, at.reshape(1, 1, 1, 1), -1.0),
    "scatter_add": lambda x, at: x.scatter_add_(-1, at.reshape(1, 1, 1, 1), x.new_ones(1, 1, 1, 1)),
}


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("name", WRITES)
def test_a_write_at_one_place_of_an_axis_that_is_split(mesh, name):
    """What is written to was whole on every device, and is split where it is written."""

    def program(device):
        x, at, mask = X.clone().to(device), AT.to(device), MASK.to(device)
        mask = mask if device == "cpu" else iso.shard(mask, mesh, P(None, None, "x"))
        x[:, 2].masked_fill_(mask, -0.25)
        WRITES[name](x, at)
        return x

    torch.testing.assert_close(program("jax").cpu(), program("cpu"))


@pytest.mark.parametrize("method", ["set", "add", "multiply", "max", "min"])
@pytest.mark.parametrize("place", [2, -1, 7])
@pytest.mark.parametrize("mode", [None, "clip"])
def test_company_changes_nothing(mesh, method, place, mode):
    x = jnp.arange(24.0).reshape(3, 2, 4)
    for where, part in (
        ((slice(None), slice(None), jnp.array([place])), jnp.full((2, 1), 5.0)),
        ((jnp.array([[place]]), slice(None), jnp.array(1)), jnp.full((1, 1, 2), 5.0)),
        ((jnp.array(place),), jnp.array(5.0)),
    ):
        want = write(x, where, part, method, mode)
        with compiling_for([jax.NamedSharding(mesh, P("x"))]):
            got = write(x, where, part, method, mode)
        np.testing.assert_array_equal(got, want)


def test_known_places():
    assert put(jnp.zeros(4), np.array([[2]]), jnp.ones((1, 1))).tolist() == [0, 0, 1, 0]
    assert put(jnp.zeros(4), np.array([2, 0]), jnp.array([1.0, 2])).tolist() == [2, 0, 1, 0]
