"""FSDP2 trains by torch, then the same memory by optax under `jax.jit`, then by torch again.

    torchrun --nproc-per-node 4 examples/torchrun.py

Every rank is one process with one device. Nothing is gathered, and nothing is copied.
"""

import jax
import optax
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import isoshard as iso


def model(device: str = "cpu") -> torch.nn.Module:
    """A small network; on "meta" without memory."""
    with torch.device(device):
        return torch.nn.Sequential(
            torch.nn.Linear(32, 128), torch.nn.GELU(), torch.nn.Linear(128, 32)
        )


def main() -> None:
    """Six steps of SGD: two by torch, two by JAX, two by torch."""
    processes = iso.distributed.init_distributed()
    torch.manual_seed(0)  # the same model and batch in every rank
    net, batch = model(), torch.randn(64, 32)
    mesh = init_device_mesh("cpu", (processes.size,), mesh_dim_names=("data",))
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    local_batch = batch.chunk(processes.size)[processes.rank]

    def by_torch() -> float:
        optimizer.zero_grad()
        loss = (net(local_batch) - local_batch).square().mean()
        loss.backward()
        optimizer.step()
        torch.distributed.all_reduce(loss.detach_())
        return float(loss) / processes.size

    forward = iso.jax_function(model("meta"))
    sgd = optax.sgd(0.5)

    @jax.jit
    def by_jax(params, state, x):
        def loss_of(params):
            return ((forward(params, x) - x) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, state = sgd.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    def say(who: str, loss: float) -> None:
        if processes.rank == 0:
            print(f"{who:5}  loss {loss:.5f}")

    for _ in range(2):
        say("torch", by_torch())
    iso.metrics.reset()
    params = iso.to_jax(net)  # {"0.weight": jax.Array, ..}, FSDP2's own memory
    state = sgd.init(params)
    x = iso.to_jax(DTensor.from_local(local_batch, mesh, [Shard(0)]))
    for _ in range(2):
        params, state, loss = by_jax(params, state, x)
        say("JAX", float(loss))
    iso.checkpoint.load_arrays(net, params)
    copied = iso.metrics.counters()["copied_bytes"]
    for _ in range(2):
        say("torch", by_torch())
    if processes.rank == 0:
        print(f"{copied} bytes were copied between the frameworks")


if __name__ == "__main__":
    main()
