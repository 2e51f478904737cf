"""Your own operators: k nearest neighbours over a ring of devices, in JAX and in torch.

    python examples/own_operators.py

The plain function computes the full matrix of distances. A handler defines what each device does
with its blocks instead; docs/own_operators.md explains every line. Shards may be of any sizes.
"""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.overrides import handle_torch_function, has_torch_function

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P

# Eight virtual devices on the CPU. With accelerators, leave this line out.
iso.simulate_devices(8)
mesh = iso.make_mesh((8,), ("domain",))

rng = np.random.default_rng(0)
points = rng.normal(size=(4_000, 3)).astype(np.float32)
queries = rng.normal(size=(400, 3)).astype(np.float32)
K = 17


def knn(x, y, k):
    """The k points of x nearest to each of y, and how far they are: in JAX, for one device."""
    square = ((x[None] - y[:, None]) ** 2).sum(-1)  # every distance there is
    near, at = jax.lax.top_k(-square, k)
    return x[at], jnp.sqrt(-near)


def knn_ring(shards, x, y, k):
    """The same on this device's blocks, while the blocks of x go round."""

    def merge(best, block, source):
        rows, real = block
        square = jnp.where(real, ((rows[None] - y[:, None]) ** 2).sum(-1), jnp.inf)
        near, at = jax.lax.top_k(-square, min(k, len(rows)))
        squares = jnp.concatenate([best[1], -near], 1)
        places = jnp.concatenate([best[0], rows[at]], 1)
        near, at = jax.lax.top_k(-squares, k)
        return jnp.take_along_axis(places, at[..., None], 1), -near

    start = jnp.zeros((len(y), k, 3), x.dtype), jnp.full((len(y), k), jnp.inf, x.dtype)
    block = x, shards.valid(x, 0)
    place, square = shards.ring(block, merge, shards.axes(x, 0), carry=start)
    return (place, jnp.sqrt(square)), (shards.like(y, 0, None, None), shards.like(y, 0, None))


def torch_knn(x, y, k):
    """The same in torch, as written for one device; its first lines let torch route it."""
    if has_torch_function((x, y)):
        return handle_torch_function(torch_knn, (x, y), x, y, k)
    square = (x[None] - y[:, None]).square().sum(-1)
    near, at = torch.topk(square, k, largest=False)
    return x[at], near.sqrt()


def torch_knn_ring(shards, x, y, k):
    """The handler in torch."""

    def merge(best, block, source):
        rows, real = block
        square = (rows[None] - y[:, None]).square().sum(-1).masked_fill(~real, torch.inf)
        near, at = torch.topk(square, min(k, len(rows)), largest=False)
        squares, places = torch.cat([best[1], near], 1), torch.cat([best[0], rows[at]], 1)
        near, at = torch.topk(squares, k, largest=False)
        return places.gather(1, at[..., None].expand(-1, -1, 3)), near

    start = x.new_zeros(len(y), k, 3), x.new_full((len(y), k), torch.inf)
    block = x, shards.valid(x, 0)
    place, square = shards.ring(block, merge, shards.axes(x, 0), carry=start)
    return (place, square.sqrt()), (shards.like(y, 0, None, None), shards.like(y, 0, None))


def mebibytes(function, *arguments):
    """What the compiled program needs on each device beside its arguments and results."""
    analysis = jax.jit(function).lower(*arguments).compile().memory_analysis()
    return analysis.temp_size_in_bytes / 2**20


spec = P("domain")
sizes = [200, 800, 500, 0, 1_000, 500, 600, 400]  # of the points; one device has none
x, y = iso.shard(points, mesh, spec), iso.shard(queries, mesh, spec)
uneven = iso.shard(points, mesh, spec, uneven="pad", sizes=sizes)

routed = iso.domain.register_function_handler(knn, knn_ring)
expected = jax.jit(knn, static_argnums=2)(points, queries, K)[1]
for name, cloud in (("equal", x), ("unequal", uneven)):
    neighbours = iso.full(routed(cloud, y, K)[1])
    print(f"JAX, {name} shards: equal to one device {np.allclose(neighbours, expected, atol=1e-5)}")
single = mebibytes(lambda x, y: knn(x, y, K), points, queries)
ring = mebibytes(lambda x, y: routed.over(mesh, spec, spec)(x, y, K), x, y)
print(f"temporary memory: one device {single:.0f} MiB, each of eight in the ring {ring:.0f} MiB")

with xs.register_function_handler(torch_knn, torch_knn_ring):
    for name, own in (("equal", None), ("unequal", sizes)):
        how = {} if own is None else {"uneven": "pad", "sizes": own}
        cloud = iso.shard(torch.from_numpy(points), mesh, spec, **how).requires_grad_()
        near, distance = torch_knn(cloud, iso.to_torch(y), K)
        near.sum().backward()
        same = np.allclose(distance.detach().cpu(), expected, atol=1e-5)
        blocks = cloud.grad.block_sizes or "equal"
        print(f"torch, {name} shards: equal to one device {same}; gradient in blocks {blocks}")
