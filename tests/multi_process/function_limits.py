"""Checks of a JAX function on DTensors: memory, meshes of some ranks, and what is refused."""

from __future__ import annotations

import gc

import isoshard as iso
from tests.multi_process.spreading import CLOSE, data, mesh_of, refused, same, spread, uneven

__all__ = [
    "check_meshes_of_some_ranks",
    "check_ranks_that_call_differently_are_told",
    "check_results_have_memory_of_their_own",
    "check_what_does_not_fit_is_refused",
    "check_what_is_kept_is_freed",
]


def check_results_have_memory_of_their_own(world):
    import torch
    from torch.distributed.tensor import Replicate, Shard

    mesh = mesh_of(world)
    x = spread(data(8, 4), mesh, Shard(0), Replicate())
    y = spread(data(8, 4, seed=1), mesh, Shard(0), Replicate())
    iso.metrics.reset()
    results = iso.torch_function(lambda x, y: (x, x, y + x, y))(x, y)
    places = [t.to_local().data_ptr() for t in (x, y, *results)]
    assert len(set(places)) == len(places), places
    cotangent = spread(data(8, 4, seed=2), mesh, Shard(0), Replicate(), grad=False)
    total = iso.torch_function(lambda x, y: x + y)(x, y)
    grads = torch.autograd.grad(total, (x, y), cotangent)
    places = [t.to_local().data_ptr() for t in (cotangent, *grads)]
    assert len(set(places)) == len(places), places
    assert iso.metrics.counters()["copies"] == 0
    y = iso.torch_function(lambda x: (x * x, x * 2))(x)[0]
    with torch.no_grad():
        x.mul_(2)
    refused(RuntimeError, "modified by an inplace operation", lambda: y.sum().backward())


def check_what_is_kept_is_freed(world):
    import jax
    import jax.numpy as jnp
    import numpy as np
    import torch
    from torch.distributed.tensor import Replicate, Shard
    from torch.utils.checkpoint import checkpoint

    mesh = mesh_of(world)
    x = spread(data(8, 8), mesh, Shard(0), Replicate())
    w = spread(data(8, 8, seed=1), mesh, Replicate(), Shard(1))
    scale, calls = np.float32([2.0]), []

    def function(x, w, scale):
        h = jnp.exp(jnp.sin(jnp.tanh(x @ w))) * scale  # needs operands, a result and others
        return h, jnp.tanh(h)

    f = iso.torch_function(function)

    def run(x, w):
        calls.append(1)
        one, two = f(x, w, scale)
        return one * two

    def gradients(call):
        return torch.autograd.grad(call(x, w).square().sum(), (x, w))

    plain = gradients(run)
    want = [data(8, 8).requires_grad_(), data(8, 8, seed=1).requires_grad_()]
    h = torch.exp(torch.sin(torch.tanh(want[0] @ want[1]))) * 2
    for got, one in zip(
        plain, torch.autograd.grad((h * h.tanh()).square().sum(), want), strict=True
    ):
        same(got, one, rtol=1e-4, atol=1e-4)
    calls.clear()
    again = gradients(lambda x, w: checkpoint(run, x, w, use_reentrant=False))
    assert len(calls) == 2
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
        offloaded = gradients(run)
    for one, two, three in zip(plain, again, offloaded, strict=True):
        assert torch.equal(one.to_local(), two.to_local())
        assert torch.equal(one.to_local(), three.to_local())

    # Torch frees what was saved after backward, though the result lives on.
    def live():
        gc.collect()
        return len(jax.live_arrays())

    before = live()
    one, two = f(x, w, scale)
    during = live()
    grads = torch.autograd.grad(one.square().sum() + two.sum(), (x, w), retain_graph=True)
    repeated = torch.autograd.grad(one.square().sum() + two.sum(), (x, w))
    assert all(map(torch.equal, (g.to_local() for g in grads), (g.to_local() for g in repeated)))
    del grads, repeated
    after = live()
    assert during - before > 9, (before, during, after)
    assert after - before <= 3, (before, during, after)  # two results, and `scale`
    refused(RuntimeError, "second time", lambda: two.sum().backward())


def check_meshes_of_some_ranks(world):
    """Each row of the mesh runs a program of its own, on other numbers; then one rank alone."""
    import jax.numpy as jnp
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard

    row = mesh_of(world)["tp"]
    a = data(4, 4, seed=mesh_of(world).get_coordinate()[0]).requires_grad_()
    x = spread(a.detach(), row, Shard(1))
    y = iso.torch_function(lambda x: jnp.cumsum(x * x, 1))(x)
    assert y.device_mesh == row
    same(y, (a * a).cumsum(1), **CLOSE)
    y.sum().backward()
    (a * a).cumsum(1).sum().backward()
    same(x.grad, a.grad, **CLOSE)
    first = DeviceMesh("cpu", [0])
    alone = spread(data(4, 4), first, Replicate(), grad=False)
    f = iso.torch_function(jnp.sin)
    if world.rank:
        refused(ValueError, "no shard in this rank, which is outside the mesh", f, alone)
    else:
        same(f(alone), data(4, 4).sin(), **CLOSE)


def check_what_does_not_fit_is_refused(world):
    import jax
    import jax.numpy as jnp
    import torch
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh = mesh_of(world)
    f = iso.torch_function(lambda *args: args[0] + 1, name="add")
    x = spread(data(8, 4), mesh, Shard(0), Replicate())
    partial = DTensor.from_local(data(8, 4), mesh, [Partial(), Replicate()], run_check=False)
    refused(ValueError, "add is called with DTensors on .* not reduced yet", f, partial)
    refused(ValueError, r"argument \[0\]\['w'\] .* split unevenly; pad", f, {"w": uneven(mesh)})
    refused(TypeError, "plain tensor of shape .8, 4. on cpu, without placements", f, x, data(8, 4))
    there = data(4).to("jax")
    refused(TypeError, r"argument \[1\] is a tensor on the jax device of this process", f, x, there)
    other = spread(data(8, 4), mesh["tp"], Shard(0))
    refused(ValueError, "DTensors of one call share one mesh", f, x, other)
    both = "share one mesh .*; argument .2. has placements"
    refused(ValueError, both, f, x, other, partial)
    refused(TypeError, "add takes DTensors, arrays and hashable constants", f, x, {1, 2})
    wrong = iso.torch_function(lambda x: x @ jnp.ones((7, 7)))
    refused(TypeError, "dot_general requires contracting dimensions", wrong, x)

    @jax.custom_vjp
    def broken(x):
        return x * 2

    broken.defvjp(lambda x: (broken(x), None), lambda _, g: 1 / 0)
    y = iso.torch_function(broken)(x)
    refused(ZeroDivisionError, "division by zero", lambda: y.sum().backward())
    refused(TypeError, "takes a function of JAX arrays, not int", iso.torch_function, 3)
    on_jax = iso.torch_function(jnp.sin, out_sharding=[Replicate()])
    refused(TypeError, "out_sharding, which is for DTensors", on_jax, there)
    assert torch.equal(f(x).full_tensor(), data(8, 4) + 1)


def check_ranks_that_call_differently_are_told(world):
    import jax.numpy as jnp
    from torch.distributed.tensor import Replicate, Shard

    from isoshard.core.errors import DistributedError

    mesh = mesh_of(world)
    x = spread(data(8, 4), mesh, Shard(0), Replicate(), grad=world.rank == 0)
    match = r"the program of sin.*gradients of operands \[0\].*gradients of operands \[\]"
    refused(DistributedError, match, iso.torch_function(jnp.sin), x)
    power = iso.torch_function(lambda x, n: x**n, name="power")
    refused(DistributedError, "the ranks do not agree", power, x.detach(), 2 + world.rank)
