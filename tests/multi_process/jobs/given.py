"""Ranks that are given different things: all of them are told who was given what, and go on."""

from __future__ import annotations

import re
import time

import numpy as np

import isoshard as iso
from isoshard import P

LIMIT = 2.0
"""Seconds in which every rank has its error."""


def start():
    iso.init_distributed(timeout=60)


def refused(world, culprit, told, function, *, seconds=LIMIT):
    """Every rank gets an error that names the culprit and what it gave, in time."""
    start = time.monotonic()
    try:
        function()
    except iso.DistributedError as error:
        text = str(error)
    else:
        raise AssertionError("nobody noticed")
    took = time.monotonic() - start
    assert took < seconds, f"{took:.2f} s: {text}"
    lines = [line for line in text.splitlines() if line.startswith("  rank")]
    named = [line for line in lines if line.startswith(f"  rank {culprit}")]
    assert named and re.search(told, named[0]), text
    assert len(lines) >= 2, text


def grid(*ranks, names=("x",), shape=None):
    import jax

    devices = np.array([jax.devices()[rank] for rank in ranks])
    return jax.sharding.Mesh(devices.reshape(shape or (len(ranks),)), names)


def host(*shape, dtype=np.float32):
    return np.arange(np.prod(shape), dtype=dtype).reshape(shape)


def shard_cases(world):
    """By name: who is odd, what its line says, and the call."""
    import jax
    import torch

    odd = world.rank == 1
    mesh, every = grid(*range(world.size)), [*range(world.size)]
    turned = every[:2][::-1] + every[2:]
    w = host(8, 4)

    def of(usual, other):
        return other if odd else usual

    def model(seed):
        torch.manual_seed(seed)
        return torch.nn.Linear(8, 8)

    plan = iso.Plan({"*.weight": P("x"), "weight": P("x"), "*": None})
    stored = iso.shard(w, mesh, P("x"))
    return {
        "shape": (r"\(12, 4\) float32", lambda: iso.shard(of(w, host(12, 4)), mesh, P("x"))),
        "rank": (r"\(8, 4, 1\)", lambda: iso.shard(of(w, w[..., None]), mesh, P("x"))),
        "dtype": ("float16", lambda: iso.shard(of(w, w.astype(np.float16)), mesh, P("x"))),
        "values": ("values [0-9a-f]{16}", lambda: iso.shard(of(w, w + 1), mesh, P("x"))),
        "one value": ("values", lambda: iso.shard(of(w, np.where(w == 5, 6, w)), mesh, P())),
        "order of rows": ("values", lambda: iso.shard(of(w, w[::-1]), mesh, P("x"))),
        "spec": (r"by P\(None, 'x'\)", lambda: iso.shard(w, mesh, of(P("x"), P(None, "x")))),
        "axis": ("no mesh axis is called 'z'", lambda: iso.shard(w, mesh, P(of("x", "z")))),
        "names of axes": (
            "mesh .*'z'",
            lambda: iso.shard(w, grid(*every, names=(of("x", "z"),)), P()),
        ),
        "order of devices": ("mesh", lambda: iso.shard(w, grid(*of(every, turned)), P("x"))),
        "shape of mesh": (
            r"mesh 'x' \(1\)",
            lambda: iso.shard(
                w, grid(*every, names=("x", "y"), shape=of((world.size, 1), (1, world.size))), P()
            ),
        ),
        "some devices": (
            "of devices .* \\(of ranks 0, 1\\)" if world.size > 2 else "mesh",
            lambda: iso.shard(w, of(mesh, grid(0, 1) if world.size > 2 else grid(1, 0)), P("x")),
        ),
        "no array": ("TypeError", lambda: iso.shard(of(w, "w.npy"), mesh, P("x"))),
        "another name": (r"v\.b", lambda: iso.shard({of("a", "b"): w}, mesh, P("x"), name="v")),
        "one more leaf": (
            r"more: \(8, 4\)",
            lambda: iso.shard({"w": w, **of({}, {"more": w})}, mesh, P("x")),
        ),
        "one leaf of many": (
            r"given: w17: \(8, 4\)",
            lambda: iso.shard({f"w{n}": w + (odd and n == 17) for n in range(300)}, mesh, P("x")),
        ),
        "a number": ("step: 2", lambda: iso.shard({"w": w, "step": of(1, 2)}, mesh, P("x"))),
        "plan": (
            r"a: .*by P\('x'",
            lambda: iso.shard({"a": w}, mesh, iso.Plan({"a": of(P(), P("x"))})),
        ),
        "sizes": (
            "sizes",
            lambda: iso.shard(
                w,
                mesh,
                P("x"),
                uneven="pad",
                sizes=of((8, *[0] * (world.size - 1)), (*[0] * (world.size - 1), 8)),
            ),
        ),
        "jax array": ("values", lambda: iso.shard(jax.numpy.asarray(of(w, w + 1)), mesh, P("x"))),
        "layout of an array on all": (
            r"by P\(None, 'x'\), lying by",
            lambda: iso.reshard(stored, of(P(), P(None, "x"))),
        ),
        "tensor": ("values", lambda: iso.shard(torch.from_numpy(of(w, w + 1)), mesh, P("x"))),
        "module's seed": ("weight: .*values", lambda: iso.shard(model(of(0, 1)), mesh, plan)),
        "module's plan": (
            r"weight: .*by P\(None, 'x'\)",
            lambda: iso.shard(
                model(0), mesh, of(plan, iso.Plan({"weight": P(None, "x"), "*": None}))
            ),
        ),
    }


def check_shard(world):
    for name, (told, call) in shard_cases(world).items():
        try:
            refused(world, 1, told, call)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
    mesh = grid(*range(world.size))
    array = iso.shard(host(8, 4), mesh, P("x"))  # life goes on
    assert array.shape == (8, 4)


def check_what_is_alike_though_it_is_written_otherwise(world):
    import jax
    import torch

    mesh, odd, w = grid(*range(world.size)), world.rank == 1, host(8, 4)
    iso.shard(jax.numpy.asarray(w) if odd else w, mesh, P("x"))
    iso.shard(np.asfortranarray(w) if odd else w, mesh, ("x", None) if odd else P("x"))
    iso.shard({"w": w}, mesh, {"w": P("x")} if odd else iso.Plan({"w": P("x")}))
    iso.shard(torch.from_numpy(w), mesh, P("x"), copy=True if odd else None)
    made = jax.jit(lambda x: iso.shard(x, mesh, P("x")))(iso.shard(w, mesh, P()))
    assert made.sharding.spec == P("x")
    with_errors = {"a": w, "b": w}
    try:
        iso.shard(with_errors, mesh, P("z"))  # all of them alike: each has its own error
    except iso.SpecError as error:
        assert "2 leaves" in str(error)
    else:
        raise AssertionError("P('z') was taken")


def check_off(world):
    mesh = grid(*range(world.size))
    mine = np.full((8, 4), world.rank, np.float32)
    array = iso.shard(mine, mesh, P("x"), check="off")
    assert (iso.local_shards(array)[0].data == world.rank).all()
    try:
        iso.shard(mine, mesh, P("x"), check="maybe")
    except iso.ShardingError as error:
        assert "check is 'values' or 'off', given was 'maybe'" in str(error)
    else:
        raise AssertionError("check='maybe' was taken")
