"""Writes through views of memory that lies on a mesh, where a view is laid out otherwise."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs

pytestmark = pytest.mark.filterwarnings("ignore::isoshard.torch_bridge.spmd.uneven.UnevenWarning")
MESHES = {"4": ((4,), ("x",)), "8": ((8,), ("x",)), "2 x 4": ((2, 4), ("x", "y"))}
COMPUTE = {
    "nothing": lambda part: part,
    "sorted": lambda part: part.sort(0)[0],
    "more": lambda part: part + 1,
    "sums": lambda part: part.cumsum(0),
}


def test_what_lies_behind_a_slice_stays():
    mesh = iso.make_mesh((4,), ("x",))
    base, found = torch.arange(8.0), []
    for count, (name, compute), start in itertools.product((1, 3, 6), COMPUTE.items(), (0, 1)):
        want, part = base.clone(), slice(start, min(start + count, 8))
        want[part] = compute(want[part])
        memory = xs.mark_sharding(base.to("jax"), mesh, ("x",))
        view = memory[part]
        xs.mark_sharding(view, mesh, (None,))
        view.copy_(compute(view))
        found.append((f"{name} of {part}", memory, want))
    xs.sync()
    for name, memory, want in found:
        assert torch.equal(memory.cpu(), want), name


def test_views_of_one_place_marked_one_after_the_other():
    mesh = iso.make_mesh((4,), ("x",))
    memory = xs.mark_sharding(torch.arange(4.0, device="jax"), mesh, ("x",))
    for view in (memory.narrow(0, 2, 2), memory[:2:3]):
        xs.mark_sharding(view, mesh, ("x",))
    assert memory.tolist() == [0, 1, 2, 3]


def _spec(draw, mesh, shape, even):
    entries = [None] * len(shape)
    for name in draw.sample(list(mesh.axis_names), len(mesh.axis_names)):
        axis = draw.randrange(len(shape))
        divides = shape[axis] % mesh.shape[name] == 0
        if entries[axis] is None and draw.random() < 0.7 and (divides or not even):
            entries[axis] = name
    return tuple(entries)


def _part(draw, tensor):
    axis = draw.randrange(tensor.dim())
    size = tensor.shape[axis]
    if draw.random() < 0.2:
        index = draw.randrange(size)
        return lambda t: t.select(axis, index)
    start, step = draw.randrange(size), draw.choice((1, 1, 1, 2, 3))
    stop = draw.randint(start + 1, size)
    where = (slice(None),) * axis + (slice(start, stop, step),)
    return lambda t: t[where]


@pytest.mark.parametrize(
    ("mesh", "seed"), [*itertools.product(("4", "2 x 4"), range(5)), ("8", 8), ("8", 9)]
)
def test_random_writes_through_marked_views(mesh, seed):
    draw = random.Random(seed)
    mesh = iso.make_mesh(*MESHES[mesh])
    shape = tuple(draw.choice((4, 8, 16, 3)) for _ in range(draw.choice((1, 2))))
    base = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    want = base.clone()
    memory = xs.mark_sharding(base.to("jax"), mesh, _spec(draw, mesh, shape, even=True))
    for _ in range(3):
        part, compute = _part(draw, want), draw.choice(list(COMPUTE.values()))
        view = part(memory)
        if view.dim():
            xs.mark_sharding(view, mesh, _spec(draw, mesh, view.shape, even=False))
            view.copy_(compute(view))
            part(want).copy_(compute(part(want)))
    torch.testing.assert_close(memory.cpu(), want)
