"""One spec, two frameworks: train a torch model on a mesh, go on in JAX with the same buffers.

    python examples/one_spec.py

This is the idea in one screen. `isoshard demo` does the same with a transformer.
"""

import jax
import jax.numpy as jnp
import torch
from flax import nnx
from torch import nn

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P, Plan
from isoshard.rules import Linear

# Eight virtual devices on the CPU. With accelerators, leave this line out.
iso.simulate_devices(8)
mesh = iso.make_mesh((2, 4), ("data", "model"))

# A torch model, written for one device.
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

# One plan says where the parameters lie: by name, the same for torch, Flax and pytrees.
plan = Plan({"0.*": Linear(out="model"), "2.*": Linear(into="model")})
model = iso.shard(model, mesh, plan)
print(iso.visualize(model[0].weight))

# A plain torch training loop, without a mesh; `xs.compile` makes each step one
# XLA program: forward, backward and optimizer.
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


@xs.compile
def step(x, y):
    """One training step, as every torch user writes it."""
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


# The task: roll the input by one place. The batch is split over the "data" axis.
x = torch.randn(512, 64)
x, y = (iso.shard(part, mesh, P("data")) for part in (x, x.roll(1, dims=1)))
for number in range(100):
    loss = step(x, y)
    if number % 20 == 0:
        print(f"step {number:3}  loss {loss.item():.5f}")

# The same buffers in JAX: a pure function of (params, inputs), for jit, grad and vmap.
f = iso.jax_function(model)
jax_x, jax_y = iso.to_jax(x), iso.to_jax(y)
jax_loss = jax.jit(lambda params: jnp.mean((f(params, jax_x) - jax_y) ** 2))
with torch.no_grad():
    torch_loss = nn.functional.mse_loss(model(x), y)
print(f"torch {torch_loss.item():.7f}  JAX {jax_loss(f.params):.7f}")
grads = jax.jit(jax.grad(jax_loss))(f.params)
print("a gradient from JAX:", grads["0.weight"].shape, grads["0.weight"].sharding.spec)

# The same plan lays out Flax layers of the same names, whose kernels are (in, out).
rngs = nnx.Rngs(0)
flax_model = nnx.Dict({"0": nnx.Linear(64, 256, rngs=rngs), "2": nnx.Linear(256, 64, rngs=rngs)})
iso.shard(flax_model, mesh, plan)
print("torch:", f.params["0.weight"].sharding.spec, " Flax:", flax_model["0"].kernel.sharding.spec)
