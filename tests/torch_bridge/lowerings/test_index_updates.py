"""Writes at one place are right on every layout of what is written to."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional as F

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P
from isoshard.torch_bridge.lowerings import registry
from isoshard.torch_bridge.lowerings.index import gather
from isoshard.torch_bridge.lowerings.index_updates import leading, put, read_slice, write
from isoshard.torch_bridge.lowerings.order import topk
from isoshard.torch_bridge.lowerings.program_partition import compiling_for
from isoshard.torch_bridge.lowerings.shape import constant_pad_nd

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
def test_a_write_at_one_place_of_an_axis_that_is_split(mesh):
    """What is written to was whole on every device, and is split where it is written."""

    def program(write, device):
        x, at, mask = X.clone().to(device), AT.to(device), MASK.to(device)
        mask = mask if device == "cpu" else iso.shard(mask, mesh, P(None, None, "x"))
        x[:, 2].masked_fill_(mask, -0.25)
        write(x, at)
        return x

    pairs = [(name, program(write, "jax"), program(write, "cpu")) for name, write in WRITES.items()]
    for name, got, want in pairs:
        torch.testing.assert_close(got.cpu(), want, msg=name)


CUTS = {
    "a slice": lambda x: read_slice(x, 0, 0, 5),
    "a place": lambda x: read_slice(x, 0, 0, 1),
    "leading": lambda x: leading(x, (7,)),
    "topk": lambda x: topk(x, 5, largest=False)[0],
    "pad": lambda x: constant_pad_nd(x, (0, -3), 0.0),
    "pad with its edge": lambda x: registry.named("aten::replication_pad1d").function(
        x.reshape(1, 8), (3, 0)
    ),
    "gather": lambda x: gather(x, 0, jnp.arange(5)),
}


def test_a_beginning_and_its_whole_are_laid_out_anew(mesh):
    """XLA took one for the other, and stopped: both lie alike on every device."""
    split, everywhere = (jax.NamedSharding(mesh, spec) for spec in (P(("x", "y")), P()))

    def parts(x):
        return [x, *(cut(x) for cut in CUTS.values())]

    x = jnp.arange(8.0)
    want = jax.jit(parts)(x)
    with compiling_for([split]):
        laid = jax.jit(lambda x: jax.lax.with_sharding_constraint(parts(x), everywhere))
        got = laid(jax.device_put(x, split))
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_marks_on_a_beginning_and_on_its_whole(mesh):
    a = iso.shard(torch.arange(16.0, device="jax").reshape(2, 8), mesh, P(None, ("x", "y")))
    c = a.split(2, -1)[0]
    for tensor in (c, a):
        xs.clear_sharding(tensor)
        xs.mark_sharding(tensor, mesh, (None, None))
    assert c.tolist() == [[0, 1], [8, 9]]
    assert a.flatten().tolist() == list(range(16))


def test_marks_on_what_repeats_a_beginning():
    mesh = iso.make_mesh((2, 2, 2), ("x", "y", "z"))
    x = torch.arange(32.0).reshape(1, 8, 4)
    there = iso.shard(x.to("jax"), mesh, P(None, "z", ("y", "x")))
    padded = F.pad(there, (2, 0), mode="replicate")
    xs.mark_sharding(padded, mesh, (None, ("z", "y"), None))
    torch.testing.assert_close(padded.cpu(), F.pad(x, (2, 0), mode="replicate"))


METHODS = ("set", "add", "multiply", "max", "min")


def test_company_changes_nothing(mesh):
    """What is written by every method, inside, at the end and outside of the array."""

    def written(x, places):
        found = []
        for n, (place, method) in enumerate(itertools.product(places, METHODS)):
            wheres = (
                ((slice(None), slice(None), place[None]), jnp.full((2, 1), 5.0)),
                ((place[None, None], slice(None), jnp.array(1)), jnp.full((1, 1, 2), 5.0)),
                ((place,), jnp.array(5.0)),
            )
            for mode, (where, part) in ((None, wheres[n % 3]), ("clip", wheres[(n + n // 5) % 3])):
                found.append(write(x, where, part, method, mode))
        return found

    given = jnp.arange(24.0).reshape(3, 2, 4), [jnp.array(place) for place in (2, -1, 7)]
    want = jax.jit(written)(*given)
    with compiling_for([jax.NamedSharding(mesh, P("x"))]):
        got = jax.jit(lambda *given: written(*given))(*given)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_known_places():
    assert put(jnp.zeros(4), np.array([[2]]), jnp.ones((1, 1))).tolist() == [0, 0, 1, 0]
    assert put(jnp.zeros(4), np.array([2, 0]), jnp.array([1.0, 2])).tolist() == [2, 0, 1, 0]
