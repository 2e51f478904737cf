"""Tensors in shards of any sizes: made, read, moved, written to, trained and refused."""

import copy
import pickle

import jax
import numpy as np
import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P, UnevenArray
from isoshard.core.errors import CopyError, ShardingError, SpecError, UnevenError

SIZES = (5, 2, 7, 4)


@pytest.fixture
def mesh():
    return iso.make_mesh((2, 4), ("data", "x"))


@pytest.fixture
def x():
    return torch.randn(18, 6, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def t(x, mesh):
    return iso.shard(x, mesh, P("x"), uneven="pad", sizes=SIZES)


def test_a_tensor_has_its_true_shape_and_its_blocks(t, x, mesh):
    assert t.shape == x.shape
    assert t.block_sizes == (SIZES, None)
    assert t.named_sharding.spec == P("x")
    assert torch.equal(t.cpu(), x)
    assert torch.equal(torch.tensor(t.tolist()), x)
    picture = iso.visualize(t, use_rich=False)
    assert "0:5" in picture and "7:14" in picture
    even = iso.shard(x, mesh, P("data"), uneven="pad")
    assert even.block_sizes is None and isinstance(iso.to_jax(even), jax.Array)
    parts = iso.shard(torch.nn.Parameter(x.clone()), mesh, P("x"), uneven="pad")
    assert isinstance(parts, torch.nn.Parameter) and parts.requires_grad
    assert parts.block_sizes == ((5, 5, 5, 3), None)  # as torch.chunk cuts
    assert [len(part) for part in x.chunk(4)] == [5, 5, 5, 3]


def pointers(u):
    return [piece.data.unsafe_buffer_pointer() for piece in u.array.addressable_shards]


def test_it_crosses_to_jax_and_back_over_the_same_buffers(t):
    u = iso.to_jax(t)
    assert isinstance(u, UnevenArray)
    assert pointers(iso.to_jax(t, copy=False)) == pointers(u)
    back = iso.to_torch(u)
    assert back.block_sizes == t.block_sizes
    assert pointers(iso.to_jax(back)) == pointers(u)
    copied = iso.to_jax(t, copy=True)
    assert not {*pointers(copied)} & {*pointers(u)}


def test_the_pieces_are_exact(t, x):
    starts = np.cumsum((0, *SIZES))
    for number, shard in enumerate(t.local_shards[:4]):
        start, stop = int(starts[number]), int(starts[number + 1])
        assert shard.indices == [slice(start, stop, 1), slice(0, 6, 1)]
        assert torch.equal(shard.data, x[start:stop])
        assert shard.unpadded_data.shape == shard.data.shape
    plain = iso.local_shards(t, framework="torch")
    assert [len(shard.data) for shard in plain] == [*SIZES, *SIZES]
    in_jax = iso.local_shards(t, framework="jax")
    assert [shard.data.shape for shard in in_jax[:4]] == [(n, 6) for n in SIZES]


def test_pieces_are_loaded_back(t, x):
    shards = t.local_shards
    for shard in shards:
        shard.data *= 2
    t.load_local_shards_(shards)
    shards[1].data = torch.zeros(3, 6)
    with pytest.raises(RuntimeError, match=r"CPU:1 has \(3, 6\) for \(2, 6\)"):
        t.load_local_shards_(shards)
    with pytest.raises(RuntimeError, match="pass one for each"):
        t.load_local_shards_(shards[:3])
    assert torch.equal(t.cpu(), 2 * x)
    assert t.block_sizes == (SIZES, None)


def test_full_and_reshard(t, x, mesh):
    whole = iso.full(t)
    assert whole.block_sizes is None
    assert iso.sharding_of(whole).spec == P()
    assert torch.equal(whole.cpu(), x)
    kept = iso.reshard(t, P("x", "data"))
    assert kept.block_sizes == (SIZES, None)
    other = iso.reshard(t, P(None, "x"))
    assert other.block_sizes == (None, (2, 2, 2, 0))
    even = iso.reshard(t, P("data"))
    assert even.block_sizes is None
    again = iso.shard(t, mesh, P("x"), uneven="pad", sizes=(0, 3, 9, 6))
    assert again.block_sizes == ((0, 3, 9, 6), None)
    for moved in (kept, other, even, again):
        assert torch.equal(moved.cpu(), x)


def test_results_keep_the_blocks(t, x):
    y = torch.tanh(t) * 2 + t
    xs.sync()
    assert y.block_sizes == (SIZES, None)
    assert (t.T @ t).block_sizes is None
    assert iso.sharding_of(y).spec == P("x")


def test_a_computed_value_is_marked_in_blocks(t, x, mesh):
    y = xs.mark_sharding(t * 2, mesh, ("x", None), sizes=(0, 3, 9, 6))
    z = y + 1
    xs.sync()
    assert y.block_sizes == z.block_sizes == ((0, 3, 9, 6), None)
    assert torch.equal(z.cpu(), 2 * x + 1)
    w = xs.mark_sharding(t + 1, mesh, (None, None))
    xs.sync()
    assert w.block_sizes is None
    assert torch.equal(w.cpu(), x + 1)
    y = xs.mark_sharding(x.to("jax"), mesh, ("x", None), sizes="chunk")
    assert y.block_sizes == ((5, 5, 5, 3), None)
    assert [len(shard.data) for shard in y.local_shards[:4]] == [5, 5, 5, 3]
    xs.clear_sharding(t)
    assert torch.equal((t + 1).cpu(), x + 1)
    xs.sync()
    assert t.block_sizes is None


def test_writes_keep_the_blocks(t, x):
    t[3:9] = 7.0
    t.mul_(2)
    t[:, 0] += 1
    want = x.clone()
    want[3:9] = 7.0
    want.mul_(2)
    want[:, 0] += 1
    assert torch.equal(t.cpu(), want)
    assert t.block_sizes == (SIZES, None)


def test_copies_and_pickles(t, x):
    twin = copy.deepcopy(t)
    xs.sync()
    assert twin.block_sizes == (SIZES, None)
    assert torch.equal(pickle.loads(pickle.dumps(t)).cpu(), x)
    assert repr(t).startswith("tensor([[")
    assert np.array_equal(np.asarray(t), x.numpy())


def test_a_model_trains_on_it(t, x):
    torch.manual_seed(0)
    ours = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
    theirs = copy.deepcopy(ours)
    ours.to("jax")
    losses = []
    for model, data in ((ours, t), (theirs, x)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            loss = (model(data).squeeze(1) - data.mean(1)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert np.allclose(losses[:2], losses[2:], rtol=1e-4)


def test_a_gradient_that_is_a_view_lies_as_its_tensor(t, x):
    t.requires_grad_()

    def step(a):
        a[None].square().sum().backward()  # the gradient of a[None] is a view of another tensor
        return a.detach() + a.grad

    step = xs.compile(step)
    for times in (1, 2, 3):
        result = step(t)
        assert t.grad.block_sizes == (SIZES, None)
        assert t.grad.partition_spec == P("x")
        assert torch.allclose(t.grad.cpu(), 2 * times * x)
        assert torch.allclose(result.cpu(), (1 + 2 * times) * x)


def test_a_captured_step_takes_and_gives_blocks(t, x):
    @xs.compile
    def step(a, b):
        return (a * b).relu(), (a * b).sum(0)

    before = iso.metrics.counters()["compilations"]
    for factor in (1.0, 2.0, 3.0):
        b = torch.full((6,), factor).to("jax")
        kept, summed = step(t, b)
        assert kept.block_sizes == (SIZES, None)
        assert torch.allclose(kept.cpu(), (x * factor).relu())
        assert torch.allclose(summed.cpu(), (x * factor).sum(0), atol=1e-5)
    assert iso.metrics.counters()["compilations"] - before < 3


def test_reading_it_gathers_nothing_on_the_devices(t, x):
    before = iso.metrics.counters()["gathers"]
    t.cpu()
    _ = t.local_shards
    assert iso.metrics.counters()["gathers"] == before
    iso.full(t)
    assert iso.metrics.counters()["gathers"] == before + 1


def test_torch_functions_lifted_in_jax(t, x):
    f = iso.jax_function(lambda a: torch.softmax(a, 0).std(0))
    found = iso.domain.lift(f)(iso.to_jax(t))
    assert np.allclose(found, torch.softmax(x, 0).std(0), atol=1e-6)
    with pytest.raises(TypeError, match=r"iso\.domain\.lift"):
        iso.jax_function(torch.relu)(iso.to_jax(t))


def test_a_jax_function_is_called_on_it(t, x):
    f = iso.torch_function(lambda a: jax.nn.softmax(a, 0) * 2)
    y = f(t.requires_grad_())
    y.square().sum().backward()
    other = x.clone().requires_grad_()
    (other.softmax(0) * 2).square().sum().backward()
    assert torch.allclose(y.detach().cpu(), x.softmax(0) * 2, atol=1e-6)
    assert torch.allclose(t.grad.cpu(), other.grad, atol=1e-5)
    assert t.grad.block_sizes == (SIZES, None)


def test_shapes_and_placements_as_shard_tensor_has_them(x, mesh):
    shapes = {1: [(5, 6), (2, 6), (7, 6), (4, 6)]}
    t = iso.domain.scatter_tensor(x, mesh, [Replicate(), Shard(0)], shapes)
    assert t.block_sizes == (SIZES, None)
    assert t.placements == (Replicate(), Shard(0))
    pieces = [*x.split(SIZES), *x.split(SIZES)]
    made = xs.XLAShardedTensor.from_local(pieces, mesh, [Replicate(), Shard(0)])
    assert made.block_sizes == (SIZES, None)
    assert torch.equal(made.cpu(), x)
    assert torch.equal(made.full_tensor().cpu(), x)
    with pytest.raises(UnevenError, match="local_shards"):
        made.to_local()


def test_checkpoints_hold_it(t, x, tmp_path):
    iso.save(tmp_path, {"t": t}).wait()
    found = iso.restore(tmp_path, {"t": torch.zeros_like(t)})["t"]
    assert found.block_sizes == t.block_sizes
    assert torch.equal(found.cpu(), x)


def test_sizes_that_do_not_sum(x, mesh):
    with pytest.raises(UnevenError, match="18"):
        iso.shard(x, mesh, P("x"), uneven="pad", sizes=(5, 2, 7, 5))
    with pytest.raises(UnevenError, match="4"):
        xs.mark_sharding(x.to("jax"), mesh, ("x", None), sizes=(9, 9))


def test_without_pad_it_is_refused(x, mesh):
    with pytest.raises(UnevenError, match="18"):
        iso.shard(x, mesh, P("x"))
    with pytest.raises(ShardingError, match="uneven='pad'"):
        iso.shard(x, mesh, P("x"), sizes=SIZES)
    with pytest.raises(ShardingError, match="Shard its arrays one by one"):
        iso.shard(torch.nn.Linear(5, 5), mesh, P("x"), uneven="pad")
    with pytest.raises(CopyError, match="padded"):
        iso.shard(x, mesh, P("x"), uneven="pad", copy=False)
    with pytest.raises(SpecError, match="rows"):
        iso.shard(x, mesh, P("rows"), uneven="pad")


def test_meshes_that_differ(t, x):
    other = iso.make_mesh((2,), ("x",), devices=jax.devices()[1::-1])
    with pytest.raises(ShardingError, match="order the devices differently"):
        t + iso.shard(x, other, P("x"))
        xs.sync()
