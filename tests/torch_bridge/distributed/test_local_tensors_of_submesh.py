"""Pieces over a part of a mesh: what the other dimensions split stays split."""

import re

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard.core.errors import ShardingError
from isoshard.torch_bridge.distributed import _functional_collectives as collectives
from isoshard.torch_bridge.distributed import init_device_mesh
from isoshard.torch_bridge.distributed.tensor import DTensor, distribute_tensor
from isoshard.torch_bridge.distributed.tensor.debug import CommDebugMode
from isoshard.torch_bridge.distributed.tensor.experimental import local_map

MOVES = r"(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("


def data(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.double)


def batch(x, mesh):
    """A batch that `dp` splits."""
    return distribute_tensor(x, mesh, [Shard(0), Replicate()])


def copies(x, mesh):
    """Pieces over `tp` alone: copies of a batch that `dp` splits."""
    return DTensor.from_local(batch(x, mesh), mesh["tp"], [Replicate()]).to_local()


def pieces(x, mesh, dim):
    whole = DTensor.from_local(batch(x, mesh), mesh["tp"], [Replicate()])
    return whole.redistribute(placements=[Shard(dim)]).to_local()


def rows(t):
    """The piece of each device along `tp`."""
    return [shard.data for shard in t.detach().local_shards if shard.replica_id == 0]


def test_there_are_pieces_along_the_part_alone(mesh):
    x = data(4, 8)
    mine = distribute_tensor(x, mesh["tp"], [Shard(1)]).to_local()
    assert mine.shape == (4, 2) and mine.axes == ("tp",)
    assert repr(mine).endswith("one on each of 4 devices along tp)")
    assert torch.equal(torch.cat(rows(mine), 1), x)
    shards = mine.local_shards
    assert [shard.rank for shard in shards] == list(range(8))
    assert [shard.replica_id for shard in shards] == [0] * 4 + [1] * 4
    assert all(torch.equal(a.data, b.data) for a, b in zip(shards[:4], shards[4:], strict=True))


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate(), Partial()])
def test_a_part_joins_its_pieces(placement, mesh):
    x = data(4, 8)
    dim = placement.dim if placement.is_shard() else None
    mine = copies(x, mesh) if dim is None else pieces(x, mesh, dim)
    whole = DTensor.from_local(mine * 2, mesh["tp"], [placement])
    kept = Replicate() if placement.is_partial() else placement
    assert whole.device_mesh == mesh["tp"] and whole.placements == (kept,)
    times = 8 if placement.is_partial() else 2
    torch.testing.assert_close(whole.cpu(), x * times)
    assert whole.placements == (kept,) and whole.device_mesh == mesh["tp"]  # once computed, too


def test_nothing_of_the_batch_moves(mesh):
    def step(x, weight):
        mine = DTensor.from_local(x, mesh["tp"], [Replicate()]).to_local()
        return DTensor.from_local(torch.relu(mine @ weight.to_local().T), mesh["tp"], [Shard(1)])

    x, weight = data(4, 16), data(8, 16, seed=1)
    split = distribute_tensor(weight, mesh["tp"], [Shard(0)])
    compiled = xs.compile(step)
    out = compiled(batch(x, mesh), split)
    torch.testing.assert_close(out.cpu(), torch.relu(x @ weight.T))
    text = xs.program_text(compiled)
    assert not re.findall(MOVES, text)
    assert "f64[2,2]" in text  # half of the batch and a quarter of the columns on each device
    comm_mode = CommDebugMode()
    with comm_mode:
        recorded = step(batch(x, mesh) * 2, split)
        xs.sync()
    assert comm_mode.get_total_counts() == 0 and recorded.placements == (Shard(1),)
    assert recorded.partition_spec == iso.P("dp", "tp")


def test_gradients_follow_dtensors_rule(mesh):
    """A column-parallel product: the gradient of the copies is a sum, as the script says."""
    x, weight, scale = data(4, 16), data(8, 16, seed=1), data(4, 8, seed=2)
    here = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    (torch.tanh(here[0] @ here[1].T) * scale).sum().backward()
    ours = batch(x, mesh).requires_grad_()
    split = distribute_tensor(weight, mesh["tp"], [Shard(0)]).requires_grad_()
    comm_mode = CommDebugMode()
    with comm_mode:
        whole = DTensor.from_local(ours, mesh["tp"], [Replicate()])
        mine = whole.to_local(grad_placements=[Partial()])
        out = DTensor.from_local(torch.tanh(mine @ split.to_local().T), mesh["tp"], [Shard(1)])
        (out * batch(scale, mesh)).sum().backward()
        xs.sync()
    torch.testing.assert_close(ours.grad.cpu(), here[0].grad)
    torch.testing.assert_close(split.grad.cpu(), here[1].grad)
    assert ours.grad.partition_spec == iso.P("dp") and split.grad.partition_spec == iso.P("tp")
    # The gradient of x is summed over tp, that of the weight over dp, and nothing is gathered.
    assert {name for name, _ in comm_mode.get_axis_counts()} == {"all_reduce"}
    assert {axes for _, axes in comm_mode.get_axis_counts()} == {("tp",), ("dp",)}


def test_collectives_along_the_part(mesh):
    x = data(4, 8)
    mine, parts = pieces(x, mesh, 1), x.chunk(4, 1)
    for group in (mesh["tp"], (mesh, "tp"), (mesh, 1)):
        total = collectives.all_reduce(mine, "sum", group)
        torch.testing.assert_close(total.agreed(), sum(parts))
    assert torch.equal(collectives.all_gather_tensor(mine, 1, mesh["tp"]).agreed(), x)
    scattered = collectives.reduce_scatter_tensor(mine, "sum", 0, mesh["tp"])
    torch.testing.assert_close(torch.cat(rows(scattered)), sum(parts))
    swapped = collectives.all_to_all_single(mine, None, None, mesh["tp"])
    for place, got in enumerate(rows(swapped)):
        torch.testing.assert_close(got, torch.cat([part[place : place + 1] for part in parts]))
    comm_mode = CommDebugMode()
    with comm_mode:
        collectives.all_reduce(pieces(x, mesh, 1), "sum", mesh["tp"])
        xs.sync()
    assert all(axes == ("tp",) for _, axes in comm_mode.get_axis_counts())


def test_every_reduction_along_the_part(mesh):
    x = data(4, 8)
    stacked = torch.stack(x.chunk(4, 1))
    means = {"sum": stacked.sum, "avg": stacked.mean, "min": stacked.amin, "max": stacked.amax}
    wholes = [DTensor.from_local(pieces(x, mesh, 1), mesh["tp"], [Partial(kind)]) for kind in means]
    xs.sync()
    for whole, wanted in zip(wholes, means.values(), strict=True):
        torch.testing.assert_close(whole.cpu(), wanted(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.bool])
def test_sums_along_the_part_in_every_width(dtype, mesh):
    """XLA's compiler for CPUs ends the process at sums of 16 bits there; they are taken in 32."""
    x = (data(4, 8) * 3).to(dtype)
    stacked = torch.stack(x.chunk(4, 1))
    total = stacked.any(0) if dtype is torch.bool else stacked.double().sum(0).to(dtype)
    whole = DTensor.from_local(pieces(x, mesh, 1), mesh["tp"], [Partial()])
    torch.testing.assert_close(whole.cpu(), total)
    mine = pieces(x, mesh, 1)
    rows_of_it = collectives.reduce_scatter_tensor(mine, "sum", 0, mesh["tp"])
    for reduced in (
        collectives.all_reduce(mine, "sum", mesh["tp"]),
        collectives.all_gather_tensor(rows_of_it, 0, mesh["tp"]),
    ):
        torch.testing.assert_close(reduced.agreed(), total)


def test_a_weight_of_the_part_meets_pieces_of_the_whole_mesh(mesh):
    x, weight = data(4, 8), data(8, seed=1)
    everywhere = distribute_tensor(x, mesh, [Shard(0), Shard(1)]).to_local()
    ours = distribute_tensor(weight, mesh["tp"], [Shard(0)]).requires_grad_()
    product = everywhere * ours.to_local()
    assert product.axes == ("dp", "tp") and product.shape == (2, 2)
    whole = DTensor.from_local(product, mesh, [Shard(0), Shard(1)])
    (whole * whole).sum().backward()
    torch.testing.assert_close(whole.detach().cpu(), x * weight)
    torch.testing.assert_close(ours.grad.cpu(), (2 * x**2 * weight).sum(0))
    # Outside of autograd as well.
    with torch.no_grad():
        again = DTensor.from_local(everywhere * ours.to_local(), mesh, [Shard(0), Shard(1)])
    torch.testing.assert_close(again.cpu(), x * weight)


def test_a_whole_over_the_mesh_of_pieces_over_a_part(mesh):
    mine = distribute_tensor(data(4, 8), mesh["tp"], [Shard(1)]).to_local()
    whole = DTensor.from_local(mine, mesh, [Replicate(), Shard(1)])
    assert whole.placements == (Replicate(), Shard(1)) and whole.device_mesh == mesh
    assert torch.equal(whole.cpu(), data(4, 8))
    with pytest.raises(ShardingError, match=r"dimension 0 .* Replicate\(\) is possible"):
        DTensor.from_local(mine, mesh, [Shard(0), Shard(1)])


def test_a_part_of_two_dimensions():
    mesh = init_device_mesh("jax", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    part = mesh["cp", "tp"]
    x = distribute_tensor(data(4, 8, 6), mesh, [Shard(0), Replicate(), Replicate()])
    whole = DTensor.from_local(x, part, [Replicate()] * 2).redistribute(
        placements=[Shard(1), Shard(2)]
    )
    mine = whole.to_local()
    assert mine.shape == (4, 4, 3) and mine.axes == ("cp", "tp")
    total = collectives.all_reduce(mine.sum(-1), "sum", mesh["tp"])
    back = DTensor.from_local(total, part, [Shard(1), Replicate()])
    torch.testing.assert_close(back.cpu(), data(4, 8, 6).sum(-1))
    assert back.partition_spec == iso.P("dp", "cp")
    narrow = distribute_tensor(data(8, seed=1), mesh["cp"], [Shard(0)]).to_local()
    scaled = DTensor.from_local(mine * narrow[:, None], part, [Shard(1), Shard(2)])
    torch.testing.assert_close(scaled.cpu(), data(4, 8, 6) * data(8, seed=1)[:, None])


def test_local_map_takes_arguments_as_they_lie_along_the_part(mesh):
    seen = []

    def columns(x, weight):
        seen.extend((x.axes, x.shape, weight.axes, weight.shape))
        return x @ weight.T

    x, weight = data(4, 16), data(8, 16, seed=1)
    product = local_map(columns, [Shard(1)], device_mesh=mesh["tp"])
    out = product(batch(x, mesh), distribute_tensor(weight, mesh, [Replicate(), Shard(0)]))
    torch.testing.assert_close(out.cpu(), x @ weight.T)
    assert seen == [("tp",), (4, 16), ("tp",), (2, 16)]
    with pytest.raises(ValueError, match=r"sharded as \(Shard\(dim=0\),\) .* requires \(Replicate"):
        local_map(
            columns, [Shard(1)], in_placements=([Shard(0)], [Replicate()]), device_mesh=mesh["tp"]
        )(
            distribute_tensor(x, mesh["tp"], [Shard(0)]),
            distribute_tensor(weight, mesh, [Replicate(), Shard(0)]),
        )
    split = distribute_tensor(data(4, 8), mesh, [Shard(0), Shard(1)])
    with pytest.raises(ShardingError, match="several placements along a dimension"):
        local_map(torch.neg, [Replicate()], device_mesh=mesh._flatten("all"))(split)


def test_pieces_that_are_turned_in_place_have_the_new_shape(mesh):
    x, w = data(8, 8), data(8, 3, seed=1)
    rows_of = distribute_tensor(x, mesh["tp"], [Shard(0)]).requires_grad_()
    product = rows_of.to_local().sum(0) @ w.to("jax")  # torch makes it with `squeeze_`
    assert product.shape == (3,)
    whole = DTensor.from_local(product, mesh["tp"], [Partial()])
    torch.testing.assert_close(whole.detach().cpu(), x.sum(0) @ w)
    whole.sum().backward()
    torch.testing.assert_close(rows_of.grad.cpu(), w.sum(1).expand(8, 8))
    turned = rows_of.detach().to_local().clone()
    turned.t_()[0].unsqueeze_(0).mul_(2)
    assert turned.shape == (8, 2)
    torch.testing.assert_close(rows(turned)[1], torch.cat([2 * x[2:4, :1], x[2:4, 1:]], 1).T)


# Ordinary tensors: one gradient where all devices compute the same, the sum of theirs otherwise.


def test_the_gradient_of_an_ordinary_tensor(mesh):
    x, scale = data(4, 8), data(8, seed=1)
    for mine in (copies(x, mesh), pieces(x, mesh, 0)):
        ours = scale.to("jax").requires_grad_()
        (mine * ours).square().sum().backward()
        torch.testing.assert_close(ours.grad.cpu(), (2 * x**2 * scale).sum(0))


def test_copies_that_are_written_to_are_alike_no_more(mesh):
    mine = copies(data(4, 8), mesh)
    view = mine.clone()
    first = view[0]
    assert view.replicated_axes == {"tp"} and (view * 2 + 1).replicated_axes == {"tp"}
    first.add_(pieces(data(4, 32), mesh, 1)[0])
    assert (
        view.replicated_axes == first.replicated_axes == (view * 2).replicated_axes == frozenset()
    )
    ours = torch.ones(8, dtype=torch.double).to("jax").requires_grad_()
    (view * ours).sum().backward()
    want = sum(row.sum(0) for row in rows(view))
    torch.testing.assert_close(ours.grad.cpu(), want)


def test_a_gradient_that_differs_is_summed(mesh):
    """What every device makes of its copy is a part of the sum, though the copies are alike."""
    ours = torch.ones(8, dtype=torch.double).to("jax").requires_grad_()
    x, scales = data(4, 8), data(4, 32, seed=1)
    (copies(x, mesh) * ours * pieces(scales, mesh, 1)).sum().backward()
    want = sum((x * part).sum(0) for part in scales.chunk(4, 1))
    torch.testing.assert_close(ours.grad.cpu(), want)


def test_a_sum_over_devices_is_alike(mesh):
    mine = pieces(data(4, 8), mesh, 1)
    assert mine.replicated_axes == frozenset()
    assert collectives.all_reduce(mine, "sum", mesh["tp"]).replicated_axes == {"tp"}
    assert collectives.all_gather_tensor(mine, 1, mesh["tp"]).replicated_axes == {"tp"}
    scattered = collectives.reduce_scatter_tensor(copies(data(4, 8), mesh), "sum", 0, mesh["tp"])
    assert scattered.replicated_axes == frozenset()


def test_dropout_differs_between_pieces_and_not_between_copies(mesh):
    torch.manual_seed(0)
    ones = torch.ones(4, 256, dtype=torch.double)
    split = rows(torch.nn.functional.dropout(pieces(ones, mesh, 1), 0.5))
    assert not any(torch.equal(split[0], other) for other in split[1:])
    same = torch.nn.functional.dropout(copies(ones, mesh), 0.5)
    assert same.replicated_axes == {"tp"} and 0.3 < (same.agreed() == 0).double().mean() < 0.7
    drawn = copies(ones, mesh).clone().bernoulli_(0.5)
    assert drawn.replicated_axes == {"tp"} and 0.3 < drawn.agreed().mean() < 0.7
    ours = torch.ones(256, dtype=torch.double).to("jax").requires_grad_()
    dropped = torch.nn.functional.dropout(copies(ones, mesh) * ours, 0.5)
    dropped.sum().backward()
    torch.testing.assert_close(ours.grad.cpu(), dropped.detach().agreed().sum(0))


def test_refused(mesh):
    t = distribute_tensor(data(2, 16), mesh["tp"], [Shard(1)]).to_local()
    columns = distribute_tensor(torch.ones(2), mesh["dp"], [Shard(0)]).to_local()
    everywhere = distribute_tensor(torch.ones(2, 4), mesh).to_local()
    part, xs_mesh = mesh["tp"], mesh.get_xs_mesh()
    split = distribute_tensor(torch.ones(4, 8), part, [Shard(1)])
    for call, error, message in (
        (lambda: t * columns, ShardingError, r"over \('tp',\) and over \('dp',\)"),
        (
            lambda: t.clone().add_(everywhere),
            RuntimeError,
            "a value per device into a tensor that is shared by devices",
        ),
        (
            lambda: collectives.all_reduce(t, "sum", mesh["dp"]),
            ShardingError,
            r"all_reduce over \('dp',\) of local tensors over \('tp',\): .*nothing to exchange",
        ),
        (
            lambda: xs.disable_manual_sharding(t, (None, None), (4, 8), mesh=xs_mesh),
            ShardingError,
            "a manual region is over all devices, and these shards are over",
        ),
        (
            lambda: DTensor.from_local(t, mesh["dp"], [Replicate()]),
            ShardingError,
            "is a submesh, and these local tensors are over",
        ),
        (
            lambda: DTensor.from_local(split, part, [Replicate()]),
            RuntimeError,
            "takes the shard of one device",
        ),
        (lambda: t[0, 0].item(), RuntimeError, "differ, so it cannot be read;"),
    ):
        with pytest.raises(error, match=message):
            call()
