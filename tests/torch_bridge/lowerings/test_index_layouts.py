"""What reads or writes by indices, with every operand laid out in a way of its own.

XLA's partitioner gives wrong sums for some layouts of a batch of scatters, so each is compared.
"""

import itertools
import operator
import random

import torch
from torch.nn import functional as F

import isoshard as iso
import isoshard.torch_bridge as xs

SIZE = (4, 8, 4)
MESH = (4, 2)


def fits(spec):
    named = [name for entry in spec for name in entry or ()]
    shards = [4 * len(entry or "x") for entry in spec]
    return len(named) == len(set(named)) and not any(map(operator.mod, SIZE, shards))


SPECS = [spec for spec in itertools.product((None, "x", "y", "xy"), repeat=3) if fits(spec)]
LAYOUTS = [
    ((None, None, "y"), ("y", None, "x"), (None, "y", "x")),
    (("y", "x", None), (None, None, None), (None, "y", "x")),
    (("x", None, "y"), ("x", None, "y"), (None, "y", "x")),
    ((None, "x", None), ("x", None, "y"), ("x", "y", None)),
]
OPERATIONS = {
    "scatter_add": lambda d, x, i, s: x.scatter_add(d, i, s),
    "gather": lambda d, x, i, s: x.gather(d, i) * s,
    "scatter": lambda d, x, i, s: x.scatter(d, i, 1.5) + s,
    "largest": lambda d, x, i, s: x.scatter_reduce(d, i, s, "amax"),
    "product": lambda d, x, i, s: x.scatter_reduce(d, i, s, "prod", include_self=False),
    "mean": lambda d, x, i, s: x.scatter_reduce(d, i, s, "mean"),
    "sort": lambda d, x, i, s: (x + s).sort(dim=d, stable=True)[1],
    "cumsum": lambda d, x, i, s: (x + s).cumsum(d),
    "index_put": lambda d, x, i, s: x.index_put((i[0],), s[:1].expand(8, 4, 8, 4), accumulate=True),
    "embedding": lambda d, x, i, s: F.embedding(i, s[0]) + x.unsqueeze(-1),
}


def run(device, function, dim, layouts, mesh):
    """The results and gradients, on the mesh unless of the CPU."""
    draw = torch.Generator().manual_seed(0)
    x, s = (torch.randint(-4, 5, SIZE, generator=draw).float() for _ in range(2))
    operands = [x, torch.randint(0, 4, SIZE, generator=draw), s]
    there = [operand.to(device) for operand in operands]
    for operand, spec in zip(there, layouts, strict=True):
        if device == "jax":
            xs.mark_sharding(operand, mesh, tuple(entry and tuple(entry) for entry in spec))
        if operand.is_floating_point():
            operand.requires_grad_()
    out = function(dim, *there)
    if out.requires_grad:
        out.square().sum().backward()
    return [out.detach(), *(one.grad for one in there if one.grad is not None)]


def check(cases):
    """Cases as one program, against the CPU's."""
    mesh = iso.make_mesh(MESH, ("x", "y"))
    found = [[run(device, *case, mesh) for case in cases] for device in ("jax", "cpu")]
    for case, got, want in zip(cases, *found, strict=True):
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(
                one.cpu(), other, rtol=1e-5, atol=1e-4, msg=lambda text, c=case: f"{c}: {text}"
            )


def test_layouts_for_which_the_partitioner_is_wrong():
    check(
        [
            (OPERATIONS["scatter_add"], dim, layouts)
            for layouts, dim in zip(LAYOUTS, (1, 2) * 2, strict=True)
        ]
    )


def test_any_layouts():
    draw = random.Random(0)
    check(
        [
            (operation, 1 + number % 2, tuple(draw.choice(SPECS) for _ in range(3)))
            for number, operation in enumerate(OPERATIONS.values())
        ]
    )


def test_diagonals_of_axes_that_are_split():
    grid = iso.make_mesh((2, 4), ("x", "y"))
    lasts = (None, None, "x"), (None, "y", "x"), (None, "y", None)
    cases = [*zip(("copy", "view", "copy"), lasts, strict=True)]

    def run(device, marked, last):
        x = torch.arange(5 * 8 * 6.0).reshape(5, 8, 6).to(device)
        if device == "jax":
            xs.mark_sharding(x, grid, last)
        diagonal = x.diagonal(-1, 0, 2)
        diagonal = diagonal if marked == "view" else diagonal + 0
        if device == "jax":
            xs.mark_sharding(diagonal, grid, ("x", "y"))
        diagonal.mul_(2)
        return x, diagonal

    for case, *found in [(case, run("jax", *case), run("cpu", *case)) for case in cases]:
        for got, want in zip(*found, strict=True):
            assert torch.equal(got.cpu(), want), case
