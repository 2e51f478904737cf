"""Several meshes over the same devices in one program."""

import jax
import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P, ShardingError, make_mesh


def on(tensor, mesh, spec):
    return xs.mark_sharding(tensor.to("jax"), mesh, spec)


def meshes(*shapes):
    return [xs.Mesh(range(8), shape, ("x", "y", "z")[: len(shape)]) for shape in shapes]


def test_meshes_of_three_shapes_meet_in_one_program():
    line, wide, tall = meshes((8,), (2, 4), (4, 2))
    torch.manual_seed(0)
    whole = [torch.randn(8, 8), torch.randn(8, 2), torch.randn(8, 2)]
    a = on(whole[0], line, ("x", None))
    b = on(whole[1], wide, ("y", None))
    c = on(whole[2], tall, ("x", "y"))
    results = [a @ b, a @ c, (a @ b + c).relu()]
    xs.sync()
    a_, b_, c_ = whole
    for got, want in zip(results, [a_ @ b_, a_ @ c_, (a_ @ b_ + c_).relu()], strict=True):
        torch.testing.assert_close(got.cpu(), want)
    assert c.sharding_spec == "{devices=[4,2]0,1,2,3,4,5,6,7}"
    assert [tuple(shard.data.shape) for shard in a.local_shards] == [(1, 8)] * 8
    a.add_(1)
    torch.testing.assert_close((a @ b).cpu(), (a_ + 1) @ b_)
    assert a.partition_spec == P("x")


def test_a_compiled_step_takes_them_too():
    line, wide = meshes((8,), (2, 4))
    weight = on(torch.ones(8, 4), wide, ("x", "y"))
    step = xs.compile(lambda x: weight.mul_(0.5).sum() + x.sum())
    x = on(torch.ones(16), line, ("x",))
    assert [step(x).item() for _ in range(3)] == [32.0, 24.0, 20.0]


def test_meshes_without_a_common_refinement_are_refused():
    flat, square = (
        make_mesh(shape, ("x", "y"), devices=jax.devices()[:6]) for shape in ((2, 3), (3, 2))
    )
    a, b = on(torch.ones(6), flat, ("x",)), on(torch.ones(6), square, ("x",))
    with pytest.raises(ShardingError, match=r"meshes of shapes \(2, 3\) and \(3, 2\)"):
        (a + b).sum().item()


def test_changing_numbers_of_a_split_program_stay_whole():
    """XLA sees that the numbers, stacked, are a split tensor, and would take them split."""
    mesh = xs.Mesh(range(8), (4, 2), ("x", "y"))
    ones = on(torch.ones(4), mesh, ("x",))
    for first in (1.5, 2.5):
        numbers = [first + place for place in range(4)]
        stacked = torch.stack([torch.full((), number, device="jax") for number in numbers])
        xs.mark_sharding(stacked + ones, mesh, ("x",))
        marked = on(stacked, mesh, ("x",)) + ones
        assert marked.tolist() == [number + 1 for number in numbers]


def test_marks_inside_a_program_may_be_on_a_mesh_of_another_shape():
    wide, tall = meshes((2, 4), (4, 2))
    data = torch.arange(64.0).reshape(8, 8)
    x = on(data, wide, ("x", None))
    h = xs.mark_sharding(x * 2, tall, ("x", "y"))
    y = xs.mark_sharding(torch.tanh(h) @ x, wide, (("x", "y"), None))
    z = y + 1
    xs.sync()
    assert tuple(h.partition_spec) == ("x", "y") and h.mesh_shape == (4, 2)
    assert iso.to_jax(h).sharding.shard_shape((8, 8)) == (2, 4)
    assert iso.to_jax(y).sharding.shard_shape((8, 8)) == (1, 8)
    want = torch.tanh(data * 2) @ data
    torch.testing.assert_close(y.cpu(), want)
    torch.testing.assert_close(z.cpu(), want + 1)

    step = xs.compile(lambda x: xs.mark_sharding(x * 2, tall, ("y", "x")) + 1)
    for _ in range(3):
        torch.testing.assert_close(step(x).cpu(), data * 2 + 1)
