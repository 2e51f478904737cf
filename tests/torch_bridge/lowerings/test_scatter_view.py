"""Writes into views, and gradients of views, against CPU torch and on meshes."""

import itertools

import jax
import torch
from jax.sharding import NamedSharding, PartitionSpec

import isoshard as iso
from isoshard.torch_bridge.lowerings import find
from tests.torch_bridge.lowerings.harness import together
from tests.torch_bridge.lowerings.samples import CUBE, FLOATS, INTS, ROW, SCALAR

aten = torch.ops.aten


def test_slices_selections_and_diagonals():
    size = list(CUBE.shape)
    with together() as check:
        for dim, start, end, step in (
            (0, None, None, 1),
            (1, 1, 3, 1),
            (-1, 0, 100, 3),
            (1, -2, None, 1),
            (2, 1, 4, 2),
            (0, 2, 1, 1),
            (0, 5, 9, 1),
        ):
            part = aten.slice.Tensor(CUBE, dim, start, end, step)
            check(aten.slice_scatter.default, CUBE, part * 10, dim, start, end, step)
            begin, stop = start or 0, 2**63 - 1 if end is None else end
            check(aten.slice_backward.default, part + 1, size, dim, begin, stop, step)
        for dim, index in ((0, 1), (-1, -2), (1, 0)):
            part = CUBE.select(dim, index)
            check(aten.select_scatter.default, CUBE, part * 10, dim, index)
            check(aten.select_backward.default, part + 1, size, dim, index)
        for offset, dims in itertools.product([-1, 0, 1], [(0, 1), (-1, 0), (2, 1)]):
            part = torch.diagonal(CUBE, offset, *dims)
            check(aten.diagonal_scatter.default, CUBE, part * 10, offset, *dims)
            check(aten.diagonal_backward.default, part + 1, size, offset, *dims)
        for dim, count, step in ((1, 2, 1), (-1, 3, 2), (0, 2, 2), (1, 1, 2)):
            windows = CUBE.unfold(dim, count, step)
            check(aten.unfold_backward.default, windows + 1, size, dim, count, step)
        # Parts of another dtype.
        check(aten.select_scatter.default, INTS, torch.ones(4, dtype=torch.int64), 0, 1)
        check(aten.slice_scatter.default, FLOATS, ROW[None], 0, 0, 1)
        flat = torch.arange(12.0)
        check(aten.as_strided_scatter.default, flat, torch.ones(2, 3) * 9, [2, 3], [5, 2], 1)
        check(aten.as_strided_copy.default, flat, [2, 2, 2], [1, 1, 4])
        check(aten.as_strided_copy.default, SCALAR, [], [])


def test_writes_into_a_split_axis_gather_nothing(mesh):
    split = NamedSharding(mesh, PartitionSpec("x", "y"))
    cases = {
        "slice_scatter": ((5, 16), (0, 2, 7)),
        "select_scatter": ((16,), (0, 3)),
        "diagonal_scatter": ((16,), ()),
    }

    def program(x, parts):
        return [
            find(getattr(aten, name).default).function(x, part, *rest)
            for part, (name, (_, rest)) in zip(parts, cases.items(), strict=True)
        ]

    whole = jax.ShapeDtypeStruct((16, 16), "float32", sharding=split)
    parts = [jax.ShapeDtypeStruct(shape, "float32") for shape, _ in cases.values()]
    compiled = jax.jit(program, out_shardings=split).lower(whole, parts).compile()
    assert "all-gather" not in compiled.as_text()


def test_the_gradient_of_a_slice_with_a_step_on_a_mesh(mesh):
    def gradient(x, start, step):
        x.requires_grad_()
        (x.exp()[start::step] * 3).sum().backward()
        return x.grad

    pairs = []
    for size, start, step in ((4, 0, 2), (4, 0, 3), (8, 1, 2), (8, 2, 4)):
        for spec in (PartitionSpec("x"), PartitionSpec("y"), PartitionSpec(None, "y")):
            x = torch.arange(size * 8.0).reshape(size, 8) / 8
            split = iso.shard(x.to("jax"), mesh, spec)
            pairs.append((gradient(split, start, step), gradient(x, start, step)))
    for got, want in pairs:
        torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=1e-5)
