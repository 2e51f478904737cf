"""Collectives of pieces, and their gradients, beside torch's in ranks."""

import pytest
import torch
import torch.distributed._functional_collectives as theirs
from torch.distributed.tensor import Replicate, Shard

from isoshard.core.errors import ShardingError
from isoshard.torch_bridge.distributed import _functional_collectives as ours
from isoshard.torch_bridge.distributed.tensor import distribute_tensor, init_device_mesh
from isoshard.torch_bridge.distributed.tensor.experimental import local_map

LINES = {"dp": [[0, 4], [1, 5], [2, 6], [3, 7]], "tp": [[0, 1, 2, 3], [4, 5, 6, 7]]}
LINES["both"] = [[*range(8)]]


def parts():
    """One tensor per device."""
    return [torch.randn(8, 3, generator=torch.Generator().manual_seed(n)) for n in range(8)]


def own(mesh, tensors):
    """What each device would hold, if it had made it itself, as a leaf."""
    whole = distribute_tensor(torch.stack(tensors), mesh._flatten("all"), [Shard(0)])
    return whole.to_local().squeeze(0).detach().requires_grad_()


def group(mesh, name):
    return mesh if name == "both" else mesh[name]


CALLS = {
    "sum": (lambda f, t, g: f.all_reduce(t, "sum", g), lambda line: [sum(line)] * len(line)),
    "avg": (
        lambda f, t, g: f.all_reduce(t, "avg", g),
        lambda line: [sum(line) / len(line)] * len(line),
    ),
    "max": (
        lambda f, t, g: f.all_reduce(t, "max", g),
        lambda line: [torch.stack(line).amax(0)] * len(line),
    ),
    "gather 0": (
        lambda f, t, g: f.all_gather_tensor(t, 0, g),
        lambda line: [torch.cat(line)] * len(line),
    ),
    "gather -1": (
        lambda f, t, g: f.all_gather_tensor(t, -1, g),
        lambda line: [torch.cat(line, -1)] * len(line),
    ),
    "scatter": (
        lambda f, t, g: f.reduce_scatter_tensor(t, "sum", 0, g),
        lambda line: sum(line).chunk(len(line)),
    ),
    "scatter avg": (
        lambda f, t, g: f.reduce_scatter_tensor(t, "avg", 0, g),
        lambda line: (sum(line) / len(line)).chunk(len(line)),
    ),
    "all to all": (
        lambda f, t, g: f.all_to_all_single(t, None, None, g),
        lambda line: [
            torch.cat([one.chunk(len(line))[place] for one in line]) for place in range(len(line))
        ],
    ),
}


@pytest.mark.parametrize("name", LINES)
def test_they_are_what_ranks_would_exchange(mesh, name):
    """Each call's results; and the gradient of a loss in each rank, of its own results."""
    leaves = [part.requires_grad_() for part in parts()]
    scales = [torch.tensor(float(rank + 1)) for rank in range(8)]
    mine = own(mesh, [part.detach() for part in leaves])
    scaled = own(mesh, scales).detach()
    found, loss, wanted_loss = {}, 0, 0
    for call, (run, reference) in CALLS.items():
        want = [torch.empty(0)] * 8
        for line in LINES[name]:
            for place, result in zip(line, reference([leaves[n] for n in line]), strict=True):
                want[place] = result
        result = run(ours, mine, group(mesh, name)).wait()
        found[call] = result, want
        if call != "max":  # gradients add up over the ranks
            loss = loss + (result * scaled).sum()
            wanted_loss += sum((one * scale).sum() for one, scale in zip(want, scales, strict=True))
    loss.backward()
    wanted_loss.backward()
    for call, (result, want) in found.items():
        for shard, wanted in zip(result.detach().local_shards, want, strict=True):
            torch.testing.assert_close(shard.data, wanted.detach(), msg=call)
    for got, leaf in zip(mine.grad.local_shards, leaves, strict=True):
        torch.testing.assert_close(got.data, leaf.grad)
    with pytest.raises(RuntimeError, match="has no gradient"):
        found["max"][0].sum().backward()


def test_the_signatures_are_torchs():
    import inspect

    for name in ours.__all__:
        have = list(inspect.signature(getattr(ours, name)).parameters)
        assert have == list(inspect.signature(getattr(theirs, name)).parameters), name


def test_inside_local_map(mesh):
    x, w = parts()[0].double(), torch.arange(12.0, dtype=torch.float64).reshape(3, 4)

    def product(group, a, b):
        return ours.all_reduce(a @ b, "sum", group).wait()

    mapped = local_map(
        product,
        out_placements=[Shard(0), Replicate()],
        in_placements=(None, None, [Shard(0), Shard(1)], [Replicate(), Shard(0)]),
        redistribute_inputs=True,
    )
    x, w = x[:, :1].repeat(1, 4), w[:1].repeat(4, 1)
    a = distribute_tensor(x, mesh, [Replicate(), Replicate()])
    b = distribute_tensor(w, mesh, [Replicate(), Replicate()])
    torch.testing.assert_close(mapped((mesh, "tp"), a, b).cpu(), x @ w)


def test_a_tensor_on_no_mesh_is_each_device_s_own(mesh):
    """As one that a function under local_map makes: all have it, and the same."""

    def agree(a, b):
        alike = torch.tensor([torch.equal(a, b)], device=a.device)
        return ours.all_gather_tensor(alike, 0, mesh)

    x = distribute_tensor(torch.ones(8, 8), mesh, [Shard(0), Shard(1)])
    found = local_map(agree, [Replicate(), Replicate()])(x, x.clone())
    assert found.tolist() == [True] * 8
    assert ours.all_reduce(torch.ones(2, device="jax"), "sum", mesh["tp"]).tolist() == [4.0, 4.0]
    with pytest.raises(ShardingError, match=r"is global: use tensor\.redistribute"):
        ours.all_reduce(x.sum(0), "sum", mesh)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda t, m: ours.all_reduce(torch.ones(2), "sum", m), "is global: use"),
        (lambda t, m: ours.all_reduce(t, "sum", [0, 1]), "no process groups"),
        (
            lambda t, m: ours.all_reduce(t, "sum", init_device_mesh("jax", (4,))),
            "of local tensors on",
        ),
        (lambda t, m: ours.reduce_scatter_tensor(t, "sum", 1, m), "splits axis 1 .*pad it"),
        (lambda t, m: ours.all_to_all_single(t, [1, 7], None, m["dp"]), "of one size"),
    ],
)
def test_what_cannot_be_is_refused(mesh, wrong, message):
    with pytest.raises(ShardingError, match=message):
        wrong(own(mesh, parts()), mesh)


def test_other_operations_are_refused(mesh):
    mine = own(mesh, parts())
    with pytest.raises(ValueError, match=r"one of \['sum', 'avg', 'min', 'max'\].*'band'"):
        ours.all_reduce(mine, "band", mesh)
    with pytest.raises(ValueError, match=r"'sum' or 'avg', got 'max'"):
        ours.reduce_scatter_tensor(mine, "max", 0, mesh)
