"""Ranks that are given different things: all of them are told who was given what, and go on."""

from __future__ import annotations

import re
import time

import numpy as np

import isoshard as iso
from isoshard import P
from tests.multi_process.exchanging import device_mesh

LIMIT = 2.0
"""Seconds in which every rank has its error."""


def start():
    iso.distributed.init_distributed(timeout=60)


def refused(world, culprit, told, function, own=None):
    """Every rank gets an error that names the culprit and what it gave, in time.

    Where the culprit has an error of its `own`, what the ranks said is a note of that.
    """
    start = time.monotonic()
    try:
        function()
    except iso.errors.DistributedError as error:
        assert own is None or world.rank != culprit, error
        text = str(error)
    except Exception as error:
        if own is None or not isinstance(error, own) or world.rank != culprit:
            raise
        text = "\n".join(error.__notes__)
    else:
        raise AssertionError("nobody noticed")
    took = time.monotonic() - start
    assert took < LIMIT, f"{took:.2f} s: {text}"
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
            r"by P\(None, 'x'\), sharded as",
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


def refuse_all(world, cases):
    for name, case in cases.items():
        try:
            refused(world, 1, *case)
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error


def check_shard(world):
    refuse_all(world, shard_cases(world))
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
    except iso.errors.SpecError as error:
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
        assert "check is 'values' or 'off', not 'maybe'" in str(error)
    else:
        raise AssertionError("check='maybe' was taken")


def check_exchange(world):
    import jax
    import torch
    from torch.distributed.tensor import DTensor, Replicate, Shard

    odd = world.rank == 1
    mesh = device_mesh(world.size)
    named = device_mesh(world.size, names=("z",))

    def dtensor(local, placement=None, on=mesh, **whole):
        return DTensor.from_local(local, on, [placement or Shard(0)], run_check=False, **whole)

    def of(usual, other):
        return other if odd else usual

    array = iso.to_jax(dtensor(torch.ones(4, 9)))
    other = iso.shard(host(4 * world.size, 9), grid(*range(world.size), names=("0",)), P("0"))
    whole = {"shape": torch.Size((4 * world.size, 5)), "stride": (5, 1)}
    cases = {
        "shape": (r"\(\d+, 4\) of", lambda: iso.to_jax(dtensor(torch.ones(4, of(3, 4))))),
        "dtype": (
            "of torch.float16",
            lambda: iso.to_jax(dtensor(torch.ones(4, 6, dtype=of(torch.float32, torch.float16)))),
        ),
        "placements": (
            r"\(Replicate\(\),\)",
            lambda: iso.to_jax(dtensor(torch.ones(4, 7), of(Shard(0), Replicate()))),
        ),
        "names": (
            r"named \('z',\)",
            lambda: iso.to_jax(dtensor(torch.ones(4, 8), on=of(mesh, named))),
        ),
        "local tensor": (
            "torch.chunk",
            lambda: iso.to_jax(dtensor(torch.ones(of(4, 5), 5), **whole)),
        ),
        "mesh of the result": (
            "to its own mesh",
            lambda: iso.to_dtensor(array, of(mesh, None)),
        ),
        "an array of one rank": (
            "ShardingError: .*no mesh of processes",
            lambda: iso.to_dtensor(of(other, jax.numpy.ones(3)), mesh),
            iso.ShardingError,
        ),
        "a tree": (
            "TypeError: .*b is str",
            lambda: iso.to_dtensor({"a": other, "b": of(other, "b")}, mesh),
            TypeError,
        ),
    }
    refuse_all(world, cases)
    assert iso.to_dtensor(array, mesh).shape == (4 * world.size, 9)


def check_torch_function(world):
    import jax.numpy as jnp
    import torch
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    odd = world.rank == 1
    mesh = device_mesh(world.size, names=("x",))

    def of(usual, other):
        return other if odd else usual

    def x(placement=None, grad=False, dtype=torch.float32):
        values = torch.arange(32.0).reshape(8, 4).to(dtype)
        made = distribute_tensor(values, mesh, [placement or Shard(0)], src_data_rank=None)
        return made.requires_grad_(grad)

    def fails(x):
        if odd:
            raise ValueError("no such case")
        return x * 2

    power = iso.torch_function(lambda x, n: x**n, name="power")
    cases = {
        "constant": ("the program of power", lambda: power(x(), of(2, 3))),
        "function": ("program", lambda: iso.torch_function(of(jnp.sin, jnp.cos), name="f")(x())),
        "gradient": (
            r"gradients of operands \[0\]",
            lambda: iso.torch_function(jnp.sin)(x(grad=odd)),
        ),
        "placements": (
            "Replicate",
            lambda: iso.torch_function(jnp.tan)(x(of(Shard(1), Replicate()))),
        ),
        "dtype": (
            "float16",
            lambda: iso.torch_function(jnp.exp)(x(dtype=of(torch.float32, torch.half))),
        ),
        "out_sharding": (
            "program",
            lambda: iso.torch_function(jnp.cosh, out_sharding=of(P("x"), P()))(x()),
        ),
        "one more": (
            "program",
            lambda: iso.torch_function(lambda *all_: sum(all_), name="g")(*[x()] * of(1, 2)),
        ),
        "a plain tensor": (
            "TypeError: .*plain tensor",
            lambda: iso.torch_function(jnp.add)(x(), of(x(), torch.ones(8, 4))),
            TypeError,
        ),
        "an error": (
            "ValueError: no such case",
            lambda: iso.torch_function(fails)(x()),
            ValueError,
        ),
    }
    refuse_all(world, cases)
    assert power(x(), 2).shape == (8, 4)


def check_save_and_restore(world):
    import torch

    odd = world.rank == 1
    mesh = grid(*range(world.size))
    folder = world.scratch / "saved"
    w = iso.shard(host(8, 4), mesh, P("x"))
    turned = iso.shard(host(8, 4), mesh, P(None, "x"))

    def of(usual, other):
        return other if odd else usual

    def model(seed):
        torch.manual_seed(seed)
        return torch.nn.Linear(2, 2)

    def save(tree=None, path=folder, **options):
        return iso.save(path, {"w": w} if tree is None else tree, **options)

    cases = {
        "path": ("other, step", lambda: save(path=of(folder, world.scratch / "other"))),
        "step": ("step 2", lambda: save(step=of(1, 2))),
        "no step": ("ValueError: step is", lambda: save(step=of(1, -1))),
        "keep": ("keep 3", lambda: save(keep=of(2, 3))),
        "one more leaf": (r"b: \(8, 4\)", lambda: save({"w": w, **of({}, {"b": w * 2})})),
        "layout": ("w: .*shards of", lambda: save({"w": of(w, turned)})),
        "host values": ("h: .*values", lambda: save({"w": w, "h": host(3) + odd})),
        "a number": ("n = 2", lambda: save({"w": w, "n": of(1, 2)})),
        "module": ("m.weight: .*values", lambda: save({"w": w, "m": model(of(0, 1))})),
        "what cannot be saved": ("TypeError", lambda: save({"w": w, **of({}, {"f": print})})),
    }
    refuse_all(world, cases)
    for step in (1, 2):
        save({"w": w, "n": step}, step=step)

    def restore(like=None, path=folder, **options):
        return iso.restore(path, {"w": w, "n": 0} if like is None else like, **options)

    cases = {
        "which step": ("the checkpoint .*1|n = 1", lambda: restore(step=of(2, 1))),
        "no such step": ("CheckpointError", lambda: restore(step=of(2, 3))),
        "no such folder": ("CheckpointError", lambda: restore(path=of(folder, folder / "none"))),
        "layout": ("w: .*None, 'x'", lambda: restore({"w": of(w, turned), "n": 0})),
        "plan": ("w: .*None, 'x'", lambda: restore(mesh=mesh, plan=of(P("x"), P(None, "x")))),
        "shape": (r"CheckpointError.*\(2, 4\)", lambda: restore({"w": of(w, w[:2]), "n": 0})),
        "a leaf": ("CheckpointError.*more", lambda: restore({"w": w, **of({"n": 0}, {"more": 0})})),
    }
    refuse_all(world, cases)
    found = restore()
    assert found["n"] == 2 and found["w"].sharding == w.sharding
