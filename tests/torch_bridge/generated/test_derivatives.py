"""Gradients are torch's in every way to run the forms of `forms.py`, at awkward points too.

The gradients of many forms are one program: each form has an argument of its own, and their sum is
differentiated. `EXAMPLES=500` tries all forms in all ways; without, JAX's `vmap` of `grad` takes
all, and the other ways share them. What fails is in `known_faults.py`, all of it.
"""

from __future__ import annotations

import functools
import os

import jax
import numpy as np
import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P
from isoshard.torch_xla_bridge.torch_xla.experimental.scan import scan

from .forms import ANY_OF_TIES, ELEMENTWISE, EVERY, PAIRS, POINTS, scalar, wanted
from .known_faults import DERIVATIVES

ROWS = np.array(list(POINTS.values()), np.float32)


def pulled(total, vs):
    """Torch's gradients of a sum; zeros where there are none."""
    if total.requires_grad:
        total.backward()
    return [torch.zeros_like(v) if v.grad is None else v.grad for v in vs]


def torch_step(lines):
    """Gradients of all lines by torch's autograd."""

    def step(v, w):
        vs = [v.detach().clone().requires_grad_() for _ in lines]
        return pulled(sum(scalar(line)(one, w) for line, one in zip(lines, vs, strict=True)), vs)

    return step


def in_torch(wrap, lines):
    """Point after point, in float64 on the device."""
    step, found = wrap(torch_step(lines)), []
    for row in ROWS:
        point = torch.tensor(row, dtype=torch.float64).to("jax")
        found.append(step(point, point.flip(0)))
    xs.sync()
    return [[one.cpu().numpy() for one in row] for row in found]


def jax_total(lines):
    """The sum of all lines, as a function of JAX."""

    def total(vs, w):
        return sum(scalar(line)(one, w) for line, one in zip(lines, vs, strict=True))

    return iso.jax_function(total)


def by_vmap(lines):
    """`vmap` of `grad`, in `jit`."""
    gradient = jax.grad(jax_total(lines))
    vs = [ROWS] * len(lines)
    return by_point(jax.jit(jax.vmap(gradient))(vs, ROWS[:, ::-1]))


def by_scan(lines):
    """`grad` in the body of `jax.lax.scan`."""
    gradient = jax.grad(jax_total(lines))

    def body(carry, row):
        return carry, gradient([row] * len(lines), row[::-1])

    return by_point(jax.jit(lambda rows: jax.lax.scan(body, 0, rows)[1])(ROWS))


def by_grad(lines):
    """`grad` alone."""
    gradient = jax.grad(jax_total(lines))
    return [gradient([row] * len(lines), row[::-1]) for row in map(jax.numpy.asarray, ROWS)]


def by_point(found):
    """Results of all points, point by point."""
    return list(zip(*[np.asarray(one) for one in found], strict=True))


def by_round_trip(lines):
    """To JAX and back: torch's backward of JAX's derivative of torch's backward."""
    back = iso.torch_function(jax.jit(jax_total(lines)))

    def step(v, w):
        vs = [v.detach().clone().requires_grad_() for _ in lines]
        return pulled(back(vs, w), vs)

    found = []
    for row in ROWS:
        point = torch.tensor(row).to("jax")
        found.append(step(point, point.flip(0)))
    return [[one.cpu().numpy() for one in row] for row in found]


def by_loop(lines):
    """A loop on the device over the points, with the forms as its body."""
    rows = torch.tensor(ROWS, dtype=torch.float64).to("jax")
    vs = [rows.clone().requires_grad_() for _ in lines]

    def body(carry, given):
        *each, w = given
        total = sum(scalar(line)(one, w) for line, one in zip(lines, each, strict=True))
        return carry + total, total

    start = torch.zeros((), dtype=torch.float64, device="jax")
    total = scan(body, start, (*vs, rows.flip(1)))[0]
    return list(zip(*[one.cpu().numpy() for one in pulled(total, vs)], strict=True))


def by_blocks(lines):
    """Elementwise forms on shards of unequal sizes, all points in one tensor."""
    mesh, sizes = iso.make_mesh((8,), ("a",)), (9, 0, 6, 5, 4, 4, 7, 1)
    laid = functools.partial(iso.shard, mesh=mesh, spec=P("a"), uneven="pad", sizes=sizes)
    v, w = (
        laid(torch.tensor(np.ascontiguousarray(rows)).reshape(36)) for rows in (ROWS, ROWS[:, ::-1])
    )
    vs = [v.detach().clone().requires_grad_() for _ in lines]
    weights = torch.linspace(1, 2, 6).repeat(6)
    weights = laid(weights)
    total = sum((form(line)(one, w) * weights).sum() for line, one in zip(lines, vs, strict=True))
    found = [one.cpu().numpy().reshape(6, 6) for one in pulled(total, vs)]
    return list(zip(*found, strict=True))


def form(line):
    """The function of a line, without weights."""
    return functools.partial(scalar(line), plain=True)


WAYS = {
    "lazy": functools.partial(in_torch, lambda step: step),
    "compile": functools.partial(in_torch, xs.compile),
    "repeat": functools.partial(in_torch, lambda step: xs.compile(step, repeat="always")),
    "torch.compile": functools.partial(
        in_torch, lambda step: torch.compile(step, backend="isoshard")
    ),
    "loop": by_loop,
    "round trip": by_round_trip,
    "grad": by_grad,
    "scan": by_scan,
    "vmap": by_vmap,
    "blocks": by_blocks,
}
BLOCKS = [line for line in (*ELEMENTWISE, *PAIRS) if "v[" not in line]


def settled(line, name, gradient):
    """A gradient as it can be compared: where torch may choose among equals, their sum."""
    if line not in ANY_OF_TIES:
        return gradient
    equal = np.equal.outer(POINTS[name], POINTS[name])
    return equal @ np.nan_to_num(gradient)


SIZE = 32
"""Forms in a program."""


def wrong(way, lines):
    """The lines whose gradient is another one than torch's, with both."""
    if len(lines) > SIZE:
        return wrong(way, lines[:SIZE]) | wrong(way, lines[SIZE:])
    try:
        found = WAYS[way](lines)
    except Exception as error:
        if len(lines) == 1:
            return {lines[0]: error}
        half = len(lines) // 2
        return wrong(way, lines[:half]) | wrong(way, lines[half:])
    faults = {}
    for name, row in zip(POINTS, found, strict=True):
        for line, one in zip(lines, row, strict=True):
            want = settled(line, name, wanted(line, name))
            finite = np.abs(want[np.isfinite(want)]).max(initial=1.0)
            if not np.allclose(
                settled(line, name, one), want, 2e-4, 1e-5 + 1e-6 * finite, equal_nan=True
            ):
                faults.setdefault(line, {})[name] = np.asarray(one), want
    return faults


def lines_of(way):
    """The forms of a way: all, or its share."""
    lines = BLOCKS if way == "blocks" else EVERY
    if way == "vmap" or "EXAMPLES" in os.environ:
        return list(lines)
    share = {"torch.compile": 16, "grad": 16}.get(way, 8)
    return list(lines[list(WAYS).index(way) :: share])


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of dynamo, which looks at it
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_torch(way):
    lines = lines_of(way)
    known = {line for ways, known in DERIVATIVES.values() if way in ways for line in known}
    found = wrong(way, [line for line in lines if line not in known])
    assert not found
    for line in known.intersection(lines):
        assert wrong(way, [line]), f"{line} is right by now"
