"""A JAX function on DTensors: values, gradients and placements against torch, in every rank."""

from __future__ import annotations

import isoshard as iso
from tests.calls import calls_of
from tests.multi_process import transformer
from tests.multi_process.function_limits import *  # noqa: F403 (more checks of this job)
from tests.multi_process.spreading import CLOSE, data, lies, mesh_of, refused, same, spread


def start():
    iso.distributed.init_distributed(timeout=90)


def check_results_and_gradients(world):
    import jax.numpy as jnp
    import torch
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = mesh_of(world)
    x, w, b = data(8, 16), data(16, 12, seed=1), data(12, seed=2)
    placed = {"x": (Shard(0), Replicate()), "w": (Replicate(), Shard(1)), "b": (Shard(0),) * 2}

    def function(x, w, b):
        return jnp.tanh(x @ w + b)

    f = iso.torch_function(function)
    wanted = [t.double().requires_grad_() for t in (x, w, b)]
    expected = torch.tanh(wanted[0] @ wanted[1] + wanted[2])
    (expected * torch.arange(12)).sum().backward()
    if world.size == 4:
        placed["b"] = (Replicate(), Replicate())
    given = [spread(t, mesh, *placed[n]) for n, t in zip("xwb", (x, w, b), strict=True)]
    y = f(*given)
    assert isinstance(y, DTensor) and y.device_mesh == mesh and y.requires_grad
    same(y, expected, **CLOSE)
    (y * spread(torch.arange(12.0), mesh, Replicate(), Replicate(), grad=False)).sum().backward()
    for name, tensor, want in zip("xwb", given, wanted, strict=True):
        assert tensor.grad.placements == placed[name], (name, tensor.grad.placements)
        same(tensor.grad, want.grad, **CLOSE)
    # Only one gradient is wanted; and none.
    x, w, b = given
    (grad,) = torch.autograd.grad(f(x.detach(), w, b.detach()).sum(), w)
    want = torch.autograd.grad(torch.tanh(wanted[0] @ wanted[1] + wanted[2]).sum(), wanted[1])
    same(grad, want[0], **CLOSE)
    with torch.no_grad():
        assert not f(x, w, b).requires_grad


def check_nothing_is_compiled_or_traced_twice(world):
    from torch.distributed.tensor import Replicate, Shard

    mesh, traced = mesh_of(world), []

    def function(x, *, power):
        traced.append(power)
        return x**power

    f = iso.torch_function(function)

    def run(rows, power):
        x = spread(data(rows, 4), mesh, Shard(0), Replicate())
        f(x, power=power).square().sum().backward()  # (the gradient of a sum has no memory)
        return x.grad

    iso.metrics.reset()
    run(8, 2)
    first, calls = iso.metrics.counters()["compilations"], len(traced)
    assert [c.what for c in iso.metrics.compilations()] == ["function", "gradient of function"]
    for _ in range(3):
        run(8, 2)
    assert iso.metrics.counters()["compilations"] == first == 2
    assert len(traced) == calls
    assert iso.metrics.counters()["copies"] == 0
    run(8, 3)  # another constant
    run(16, 3)  # another shape
    assert iso.metrics.counters()["compilations"] == 6
    run(8, 2)
    assert iso.metrics.counters()["compilations"] == 6


def check_trees_integers_and_arrays(world):
    import jax
    import jax.numpy as jnp
    import numpy as np
    import torch
    from torch.distributed.tensor import Replicate, Shard

    mesh = mesh_of(world)
    table = spread(data(10, 4), mesh, Replicate(), Shard(1))
    index = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6], dtype=torch.int32)
    rows = spread(index, mesh, Shard(0), Replicate(), grad=False)
    closed_over = jnp.arange(4.0)

    def function(tree, scale, *, noise, key, mode):
        picked = tree["table"][tree["rows"]] * scale + noise + closed_over
        noisy = picked + jax.random.uniform(key, picked.shape)
        return {"best": jnp.argmax(picked, 1), "out": (noisy, None), "mode": mode == "train"}

    key = jax.random.key(7)
    noise = np.arange(4, dtype=np.float32)
    scale = torch.tensor(2.0, requires_grad=True)  # one number is the same in every rank
    got = iso.torch_function(function)(
        {"table": table, "rows": rows}, scale, noise=noise, key=key, mode="train"
    )
    want_table = data(10, 4).requires_grad_()
    want_scale = torch.tensor(2.0, requires_grad=True)
    picked = want_table[index.long()] * want_scale + torch.from_numpy(noise) + torch.arange(4.0)
    noisy = picked + torch.tensor(np.asarray(jax.random.uniform(key, (8, 4))))
    assert got["best"].dtype == torch.int32 and not got["best"].requires_grad
    assert got["out"][1] is None
    assert bool(got["mode"].full_tensor())
    same(got["best"], picked.argmax(1))
    same(got["out"][0], noisy, **CLOSE)
    got["out"][0].square().sum().backward()
    noisy.square().sum().backward()
    same(table.grad, want_table.grad, **CLOSE)
    torch.testing.assert_close(scale.grad, want_scale.grad, **CLOSE)


def check_gradients_arrive_with_any_placements(world):
    import jax.numpy as jnp
    import torch
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh = mesh_of(world)
    f = iso.torch_function(lambda x, w: jnp.sin(x) @ w)
    x = spread(data(8, 8), mesh, Shard(0), Replicate())
    w = spread(data(8, 8, seed=1), mesh, Replicate(), Shard(1))
    a, b = data(8, 8).requires_grad_(), data(8, 8, seed=1).requires_grad_()
    cotangent = data(8, 8, seed=2)
    want = torch.autograd.grad(torch.sin(a) @ b, (a, b), cotangent)
    sums = DTensor.from_local(cotangent / world.size, mesh, [Partial(), Partial()], run_check=False)
    for grad in (
        spread(cotangent, mesh, Replicate(), Replicate(), grad=False),
        spread(cotangent, mesh, Shard(1), Shard(0), grad=False),
        spread(cotangent, mesh, Replicate(), Shard(1), grad=False),
        sums,
    ):
        got = torch.autograd.grad(f(x, w), (x, w), grad)
        for tensor, one, two in zip((x, w), got, want, strict=True):
            assert one.placements == tensor.placements
            same(one, two, **CLOSE)
    try:
        f(x, w).backward(cotangent)
    except (TypeError, RuntimeError) as error:
        assert "DTensor" in str(error), error
    else:
        raise AssertionError("a plain gradient of a DTensor was taken")


def check_results_that_are_not_used_and_gradients_of_gradients(world):
    import jax.numpy as jnp
    import torch
    from torch.distributed.tensor import Replicate, Shard

    mesh = mesh_of(world)

    def function(x, w):
        return jnp.tanh(x @ w), jnp.sum(x * x, 0), w * 3

    def by_torch(x, w):
        return torch.tanh(x @ w), (x * x).sum(0), w * 3

    f = iso.torch_function(function)
    x = spread(data(8, 4), mesh, Shard(0), Replicate())
    w = spread(data(4, 4, seed=1), mesh, Replicate(), Shard(1))
    a, b = data(8, 4).double().requires_grad_(), data(4, 4, seed=1).double().requires_grad_()

    def second(function, x, w):
        one, two, _ = function(x, w)
        first = torch.autograd.grad(one.square().sum() + two.sum(), (x, w), create_graph=True)
        total = first[0].square().sum() + first[1].square().sum()
        return [*first, *torch.autograd.grad(total, (x, w))]

    for tensor, got, want in zip(
        (x, w, x, w), second(f, x, w), second(by_torch, a, b), strict=True
    ):
        assert got.placements == tensor.placements
        same(got, want, rtol=1e-4, atol=1e-4)


def check_custom_vjp_shard_map_and_constraints(world):
    import jax
    import jax.numpy as jnp
    import torch
    from jax.sharding import PartitionSpec as P
    from torch.distributed.tensor import Shard

    mesh = mesh_of(world)

    @jax.custom_vjp
    def clipped(x):
        return x * 1.0

    clipped.defvjp(lambda x: (clipped(x), None), lambda _, g: (jnp.clip(g, -1.0, 1.0),))
    x = spread(data(8, 4), mesh, Shard(0), Shard(1))
    (iso.torch_function(clipped)(x) * 5).sum().backward()
    same(x.grad, torch.ones(8, 4))

    def local(x):  # the largest of each device's part, spread over that part
        return x - jax.lax.pmean(x.mean(), ("dp", "tp"))

    def function(x):  # both find the mesh of the DTensors
        x = jax.lax.with_sharding_constraint(x, P("tp", "dp"))
        return jax.shard_map(local, in_specs=P("tp", "dp"), out_specs=P("tp", "dp"))(x)

    x.grad = None
    y = iso.torch_function(function)(x)
    lies(y, Shard(1), Shard(0))
    a = data(8, 4).requires_grad_()
    same(y, a - a.mean(), **CLOSE)
    y.square().sum().backward()
    (a - a.mean()).square().sum().backward()
    assert x.grad.placements == x.placements
    same(x.grad, a.grad, **CLOSE)


def check_placements_of_results_can_be_asked_for(world):
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P
    from torch.distributed.tensor import Replicate, Shard

    mesh = mesh_of(world)
    x = spread(data(8, 4), mesh, Shard(0), Replicate())
    asked = {"a": P("tp", "dp"), "b": [Replicate(), Shard(1)]}
    f = iso.torch_function(lambda x: {"a": x + 1, "b": jnp.sin(x)}, out_sharding=asked)
    found = f(x)
    lies(found["a"], Shard(1), Shard(0))
    lies(found["b"], Replicate(), Shard(1))
    same(found["b"], data(8, 4).sin(), **CLOSE)
    (found["a"] + found["b"]).sum().backward()
    same(x.grad, 1 + data(8, 4).cos(), **CLOSE)
    whole = iso.torch_function(lambda x: (x, x * 2), out_sharding=P())(x)
    for y in whole:
        lies(y, Replicate(), Replicate())
    refused(ValueError, "result 0 of", iso.torch_function(jnp.sin, out_sharding=P("z")), x)
    refused(
        ValueError, "one spec or a tree", iso.torch_function(jnp.sin, out_sharding={"a": P()}), x
    )


def check_exchange_is_the_same_work_for_any_size(world):
    import torch
    from torch.distributed.tensor import Replicate, Shard

    mesh = mesh_of(world)
    tensors = {size: torch.ones(size // 1024, 256) for size in (2**12, 2**26)}
    tensors = {s: spread(t, mesh, Shard(0), Replicate(), grad=False) for s, t in tensors.items()}
    arrays = {size: iso.to_jax(tensor, copy=False) for size, tensor in tensors.items()}
    there = [calls_of(lambda t=t: iso.to_jax(t, copy=False)) for t in tensors.values()]
    back = [calls_of(lambda a=a: iso.to_dtensor(a, mesh, copy=False)) for a in arrays.values()]
    for small, large in (there, back):
        assert small == large < 1000


def check_a_transformer_block(world):
    """DTensor's own block, tensor parallel and FSDP2, and the same buffers in one JAX program."""
    import jax
    import torch
    from torch.distributed.tensor import DTensor, Shard

    mesh = mesh_of(world)
    replicas = mesh.size(0)
    block = transformer.parallel(transformer.made(), mesh)
    x, weight = data(8, 16, transformer.WIDTH), data(8, 16, transformer.WIDTH, seed=1)
    batch = spread(x, mesh, Shard(0), Shard(1))
    weights = spread(weight, mesh, Shard(0), Shard(1), grad=False)

    # One process in float64, torch's own parallel block, and JAX on the very same shards.
    alone, whole = transformer.made(torch.float64), x.double().requires_grad_()
    expected = alone(whole)
    (expected * weight).sum().backward()

    local = batch.detach().to_local().requires_grad_()
    own = block(local)  # FSDP2 takes the mean of the replicas' gradients
    (replicas * own * weights.to_local()).sum().backward()
    theirs = {name: p.grad.full_tensor() for name, p in block.named_parameters()}
    block.zero_grad()

    # Handed over and back by hand: every shard is the local tensor's memory.
    params = dict(block.named_parameters())
    arrays = {name: iso.to_jax(p.detach(), copy=False) for name, p in params.items()}
    activations = iso.to_jax(batch.detach(), copy=False)
    for tensor, array in [(batch, activations), *((params[n], arrays[n]) for n in params)]:
        assert array.addressable_data(0).unsafe_buffer_pointer() == tensor.to_local().data_ptr()
    by_jax = jax.jit(transformer.jax_block)(arrays, activations)
    back = iso.to_dtensor(by_jax, mesh, copy=False)
    pointer = by_jax.addressable_data(0).unsafe_buffer_pointer()
    assert back.to_local().data_ptr() == pointer
    same(back, expected, **CLOSE)

    # As one function in torch's graph.
    iso.metrics.reset()
    f = iso.torch_function(transformer.jax_block)
    y = f(block, batch)
    same(y, expected, **CLOSE)
    mine = DTensor.from_local(own.detach(), mesh, [Shard(0), Shard(1)], run_check=False)
    torch.testing.assert_close(y.full_tensor(), mine.full_tensor(), **CLOSE)
    (y * weights.redistribute(placements=y.placements)).sum().backward()
    assert iso.metrics.counters()["copies"] == 0
    for name, p in block.named_parameters():
        assert p.grad.placements == p.placements, name
        same(p.grad, alone.get_parameter(name).grad, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            p.grad.full_tensor(), theirs[name], rtol=1e-4, atol=1e-4, msg=name
        )
    same(batch.grad, whole.grad, **CLOSE)
    torch.testing.assert_close(batch.grad.to_local(), local.grad / replicas, rtol=1e-4, atol=1e-4)
    assert batch.grad.placements == batch.placements
