"""register_sharding: the pair of layouts that a rule accepts and that moves the least."""

import pytest
import torch
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute
from torch.distributed.tensor.experimental import register_sharding as torch_register

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard.torch_bridge.distributed.device_mesh import init_device_mesh
from isoshard.torch_bridge.distributed.tensor import distribute_tensor
from isoshard.torch_bridge.distributed.tensor.debug import CommDebugMode
from isoshard.torch_bridge.distributed.tensor.experimental import (
    local_map,
    register_sharding,
    unregister_sharding,
)

from . import oracle

aten = torch.ops.aten
SOFTMAX = [aten._softmax.default, aten._softmax_backward_data.default]


@pytest.fixture
def registered():
    """`register_sharding`, for the length of a test."""
    done = []

    def register(op):
        done.append(op)
        return register_sharding(op)

    yield register
    for op in done:
        unregister_sharding(op)


def rows_of_softmax(x, dim, half_to_float):
    split = [([Shard(n)], [Shard(n), None, None]) for n in range(x.ndim) if n != dim % x.ndim]
    return [([Replicate()], [Replicate(), None, None]), *split]


def given(mesh, placements, *shape, seed=0):
    whole = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return whole, distribute_tensor(whole, mesh, placements).requires_grad_()


def close(ours, expected):
    torch.testing.assert_close(ours.detach().cpu(), expected.detach(), rtol=1e-5, atol=1e-5)


def test_results_lie_as_in_dtensor(line, registered):
    registered(aten._softmax.default)(rows_of_softmax)
    found = []
    for axis, dim in [(0, -1), (0, 0), (1, 1), (1, -1), (2, -1), (2, 1)]:
        x, ours = given(line, [Shard(axis)], 8, 12, 16)
        found.append((axis, dim, x, torch.softmax(ours, dim)))
    xs.sync()
    with oracle.ranks((4,)) as torch_mesh:
        torch_register(aten._softmax.default)(rows_of_softmax)
        for axis, dim, x, out in found:
            theirs = torch.softmax(torch_distribute(x.clone(), torch_mesh, [Shard(axis)]), dim)
            assert isinstance(theirs, TorchDTensor)
            assert out.placements == theirs.placements
    for _, dim, x, out in found:
        close(out, x.softmax(dim))


def test_a_rule_takes_the_place_of_what_the_partitioner_chose(line, registered):
    _, ours = given(line, [Shard(0)], 8, 16)
    assert torch.softmax(ours, 0).placements == (Shard(0),)
    registered(aten._softmax.default)(rows_of_softmax)
    assert torch.softmax(ours, 0).placements == (Replicate(),)
    unregister_sharding(aten._softmax.default)
    assert torch.softmax(ours, 0).placements == (Shard(0),)


def test_each_dimension_of_a_mesh_takes_a_pair_of_its_own(registered):
    mesh = init_device_mesh("jax", (2, 4), mesh_dim_names=("dp", "tp"))
    registered(aten._softmax.default)(rows_of_softmax)
    x, ours = given(mesh, [Shard(0), Shard(1)], 8, 16)
    comm_mode = CommDebugMode()
    with comm_mode:
        out = torch.softmax(ours, 1)
    assert out.placements == (Shard(0), Replicate()) and set(comm_mode.get_axis_counts()) == {
        ("all_gather", ("tp",))
    }
    close(out, x.softmax(1))


def test_gradients_go_through_and_have_rules_of_their_own(line, registered):
    seen = []

    @registered(SOFTMAX)
    def rule(*args):
        seen.append([arg.placements for arg in args if hasattr(arg, "placements")])
        tensors = len(seen[-1])
        return [([Shard(1)], [Shard(1)] * tensors + [None] * (len(args) - tensors))]

    x, ours = given(line, [Shard(0)], 8, 16)
    weight = torch.arange(128.0).reshape(8, 16)
    out = torch.softmax(ours, 0)
    (out * weight.to("jax")).sum().backward()
    assert out.placements == (Shard(1),) and [len(one) for one in seen] == [1, 2]
    x.requires_grad_()
    (x.softmax(0) * weight).sum().backward()
    close(ours.grad, x.grad)


def test_several_results_and_operands(line, registered):
    @registered(aten.cummax.default)
    def along(x, dim):
        return [([Shard(n), Replicate()], [Shard(n), None]) for n in range(x.ndim) if n != dim]

    x, ours = given(line, [Shard(1)], 8, 12)
    found = torch.cummax(ours, 0)
    assert [one.placements for one in found] == [(Shard(1),), (Replicate(),)]
    for got, wanted in zip(found, torch.cummax(x, 0), strict=True):
        close(got, wanted)


def test_the_cheapest_by_what_moves(line, registered):
    """The small operand is gathered, not the large one."""

    @registered(aten.mm.default)
    def product(a, b):
        return [([Shard(0)], [Shard(0), Replicate()]), ([Shard(1)], [Replicate(), Shard(1)])]

    (x, a), (y, b) = given(line, [Shard(0)], 64, 8), given(line, [Shard(1)], 8, 4, seed=1)
    assert (a @ b).placements == (Shard(0),)
    assert (b.T @ a.T).placements == (Shard(1),)
    close(a @ b, x @ y)


def test_open_sums(line, registered):
    """Of a result they are the sum, whole; an argument has none."""

    @registered(aten.mm.default)
    def product(a, b):
        return [([Partial()], [Partial(), Replicate()]), ([Partial()], [Shard(1), Shard(0)])]

    (x, a), (y, b) = given(line, [Shard(0)], 8, 8), given(line, [Shard(0)], 8, 4, seed=1)
    out = a @ b
    assert out.placements == (Replicate(),)
    close(out, x @ y)


def test_plain_tensors_pieces_and_what_is_on_no_mesh(line, registered):
    seen = []

    @registered(aten.mm.default)
    def product(a, b):
        seen.append((a.placements, b.placements))
        return [([Shard(0)], [Shard(0), Replicate()])]

    x, a = given(line, [Shard(0)], 8, 8)
    plain = torch.eye(8, device="jax")
    close(plain @ plain, torch.eye(8))
    local_map(torch.mm, [Shard(0)], ([Shard(0)], [Replicate()]), device_mesh=line)(
        a.detach(), distribute_tensor(torch.eye(8), line)
    )
    assert not seen  # no tensor on a mesh; and pieces are no DTensors
    close(a @ plain, x)
    assert seen == [((Shard(0),), (Replicate(),))]


def test_steps_are_captured_with_it(line, registered):
    registered(aten._softmax.default)(rows_of_softmax)
    x, ours = given(line, [Shard(0)], 8, 16)
    step = xs.compile(lambda t: torch.softmax(t, 0) * 2)
    for _ in range(3):
        close(step(ours.detach()), x.softmax(0) * 2)


def test_rules_that_do_not_suit(line, registered):
    pairs = []
    registered(aten._softmax.default)(lambda x, dim, half: pairs)
    _, ours = given(line, [Shard(0)], 8, 16)
    for pairs, message in (  # noqa: B007
        ([], "none of the 0 registered shardings"),
        ([([Shard(0)], [Shard(5), None, None])], r"suits arguments \(8, 16\) .*Shard\(dim=0\)"),
        ([([Shard(0)], [Partial(), None, None])], "accept .*Replicate.* as well"),
        ([([Shard(0)], [None, None, None])], "for 1 tensors; give one placement for each"),
        ([([], [Shard(0), None, None])], "for 1 results"),
    ):
        with pytest.raises(iso.ShardingError, match=message):
            torch.softmax(ours, 1)


def test_two_meshes(line, registered):
    registered(aten.mm.default)(lambda a, b: [([Shard(0)], [Shard(0), Replicate()])])
    other = init_device_mesh("jax", (2, 2))
    (_, a), (_, b) = given(line, [Shard(0)], 8, 8), given(other, [Shard(0), Shard(1)], 8, 8)
    with pytest.raises(iso.ShardingError, match="registered for one mesh; bring them to one"):
        a @ b


def test_what_cannot_be_registered():
    with pytest.raises(TypeError, match=r"takes an overload, as torch\.ops.*this is 'softmax'"):
        register_sharding("softmax")
    with pytest.raises(iso.ShardingError, match=r"add_\.Tensor.*writes to an argument"):
        register_sharding(aten.add_.Tensor)
