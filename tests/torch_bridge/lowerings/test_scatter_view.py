import itertools

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.sharding import NamedSharding, PartitionSpec

import isoshard as iso
from isoshard.torch_bridge.lowerings import find
from tests.torch_bridge.lowerings.harness import check
from tests.torch_bridge.lowerings.samples import CUBE, FLOATS, INTS, ROW, SCALAR

aten = torch.ops.aten
_SLICES = [
    (0, None, None, 1),
    (1, 1, 3, 1),
    (-1, 0, 100, 3),
    (1, -2, None, 1),
    (2, 1, 4, 2),
    (0, 2, 1, 1),
    (0, 5, 9, 1),
]


@pytest.mark.parametrize(("dim", "start", "end", "step"), _SLICES)
def test_slices(dim, start, end, step):
    part = aten.slice.Tensor(CUBE, dim, start, end, step)
    check(aten.slice_scatter.default, CUBE, part * 10, dim, start, end, step)
    begin, stop = start or 0, 2**63 - 1 if end is None else end
    check(aten.slice_backward.default, part + 1, list(CUBE.shape), dim, begin, stop, step)


@pytest.mark.parametrize(("dim", "index"), [(0, 1), (-1, -2), (1, 0)])
def test_selects(dim, index):
    part = CUBE.select(dim, index)
    check(aten.select_scatter.default, CUBE, part * 10, dim, index)
    check(aten.select_backward.default, part + 1, list(CUBE.shape), dim, index)


def test_parts_of_another_dtype():
    check(aten.select_scatter.default, INTS, torch.ones(4, dtype=torch.int64), 0, 1)
    check(aten.slice_scatter.default, FLOATS, ROW[None], 0, 0, 1)


@pytest.mark.parametrize(
    ("offset", "dims"), list(itertools.product([-1, 0, 1], [(0, 1), (-1, 0), (2, 1)]))
)
def test_diagonals(offset, dims):
    part = torch.diagonal(CUBE, offset, *dims)
    check(aten.diagonal_scatter.default, CUBE, part * 10, offset, *dims)
    check(aten.diagonal_backward.default, part + 1, list(CUBE.shape), offset, *dims)


def test_strides():
    flat = torch.arange(12.0)
    check(aten.as_strided_scatter.default, flat, torch.ones(2, 3) * 9, [2, 3], [5, 2], 1)
    check(aten.as_strided_copy.default, flat, [2, 2, 2], [1, 1, 4])
    check(aten.as_strided_copy.default, SCALAR, [], [])


@pytest.mark.parametrize(("dim", "size", "step"), [(1, 2, 1), (-1, 3, 2), (0, 2, 2), (1, 1, 2)])
def test_windows(dim, size, step):
    windows = CUBE.unfold(dim, size, step)
    check(aten.unfold_backward.default, windows + 1, list(CUBE.shape), dim, size, step)


@pytest.mark.parametrize("name", ["slice_scatter", "select_scatter", "diagonal_scatter"])
def test_writes_into_a_split_axis_gather_nothing(mesh, name):
    split = NamedSharding(mesh, PartitionSpec("x", "y"))
    whole = jax.device_put(jnp.zeros((16, 16)), split)
    lowering = find(getattr(aten, name).default).function
    part, rest = {
        "slice_scatter": (jnp.ones((5, 16)), (0, 2, 7)),
        "select_scatter": (jnp.ones(16), (0, 3)),
        "diagonal_scatter": (jnp.ones(16), ()),
    }[name]
    compiled = jax.jit(lambda x, p: lowering(x, p, *rest), out_shardings=split)
    text = compiled.lower(whole, part).compile().as_text()
    assert "all-gather" not in text


@pytest.mark.parametrize(("size", "start", "step"), [(4, 0, 2), (4, 0, 3), (8, 1, 2), (8, 2, 4)])
@pytest.mark.parametrize("spec", [PartitionSpec("x"), PartitionSpec("y"), PartitionSpec(None, "y")])
def test_the_gradient_of_a_slice_with_a_step_on_a_mesh(mesh, size, start, step, spec):
    x = torch.arange(size * 8.0).reshape(size, 8)

    def gradient(x):
        x.requires_grad_()
        (x.exp()[start::step] * 3).sum().backward()
        return x.grad

    got = gradient(iso.shard((x / 8).to("jax"), mesh, spec)).cpu()
    torch.testing.assert_close(got, gradient(x / 8), rtol=1e-5, atol=1e-5)
