"""The examples of the DTensor RFC with torch's own DTensor, each handed to JAX and back.

`tests/torch_bridge/distributed/test_rfc.py` runs them on one process's mesh, and says what was
corrected in their spelling. What rank 0 writes to `world.scratch`, the test compares with that.
"""

from __future__ import annotations

import isoshard as iso


def start():
    iso.distributed.init_distributed(timeout=90)


def handed_over(dtensor):
    """The global array of a DTensor: this rank's buffer, there and on the way back."""
    from torch.distributed.tensor import DTensor

    array = iso.to_jax(dtensor)
    local = dtensor.to_local()
    (shard,) = array.addressable_shards
    assert array.shape == tuple(dtensor.shape) and shard.data.shape == tuple(local.shape)
    assert shard.data.unsafe_buffer_pointer() == local.data_ptr(), "the buffer was copied"
    back = iso.to_dtensor(array, dtensor.device_mesh)
    assert isinstance(back, DTensor) and back.placements == dtensor.placements
    assert back.to_local().data_ptr() == local.data_ptr(), "the way back copied"
    return array


def weighted(array):
    """Numbers that tell elements and their places apart: weighted sums along both axes."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import torch

    @jax.jit
    def sums(x):
        rows, columns = jnp.arange(x.shape[0]) + 1.0, jnp.arange(x.shape[1]) + 1.0
        return jnp.concatenate([rows @ x, x @ columns])

    replicated = jax.sharding.NamedSharding(array.sharding.mesh, jax.sharding.PartitionSpec())
    whole = jax.jit(lambda x: x, out_shardings=replicated)(sums(array))
    return torch.from_numpy(np.asarray(whole.addressable_data(0)).copy())


def keep(world, name, value):
    import torch

    if world.rank == 0:
        torch.save(value, world.scratch / f"{name}.pt")


def check_a_big_tensor_in_three_lines(world):
    import torch
    from torch.distributed import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from tests.torch_bridge.distributed import rfc_model

    mesh = DeviceMesh("cpu", list(range(world.size)))
    big_tensor = rfc_model.big_tensor()
    my_dtensor = distribute_tensor(big_tensor, mesh, [Shard(dim=0)])
    assert my_dtensor.to_local().shape == (big_tensor.shape[0] // world.size, 88)
    array = handed_over(my_dtensor)
    keep(world, "big", weighted(array))
    assert torch.equal(iso.to_dtensor(array, mesh).full_tensor(), big_tensor)


def check_rows_columns_and_copies_from_the_start(world):
    from torch.distributed import DeviceMesh
    from torch.distributed import tensor as distributed
    from torch.distributed.tensor import Replicate, Shard

    one = DeviceMesh(device_type="cpu", mesh=[0, 1, 2, 3])
    two = DeviceMesh(device_type="cpu", mesh=[[0, 1], [2, 3]])
    for mesh, placement, size, local in (
        (one, [Shard(0)], (8, 12), (2, 12)),
        (one, [Shard(1)], (8, 12), (8, 3)),
        (one, [Replicate()], (8, 12), (8, 12)),
        (two, [Replicate(), Shard(0)], (8, 8), (4, 8)),
    ):
        made = distributed.empty(size, device_mesh=mesh, placements=placement)
        assert made.to_local().shape == local
        handed_over(made)
        ones = distributed.ones(size, device_mesh=mesh, placements=placement)
        numbers = weighted(handed_over(ones))
        keep(world, f"ones-{mesh.ndim}-{size[1]}-{local[0]}", numbers)


def check_from_a_local_tensor_and_redistributed(world):
    import torch
    from torch.distributed import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    from tests.torch_bridge.distributed import rfc_model

    device_mesh = DeviceMesh(device_type="cpu", mesh=[0, 1, 2, 3])
    local_tensor = rfc_model.local_tensor().requires_grad_()
    rowwise_tensor = DTensor.from_local(local_tensor, device_mesh, [Shard(0)])
    colwise_tensor = rowwise_tensor.redistribute(device_mesh, [Shard(1)])
    replica_tensor = colwise_tensor.redistribute(device_mesh, [Replicate()])
    numbers = [
        weighted(handed_over(tensor.detach()))
        for tensor in (rowwise_tensor, colwise_tensor, replica_tensor)
    ]
    keep(world, "from-local", torch.stack(numbers))
    weights = distribute_tensor(rfc_model.weights(), device_mesh, [Replicate()])
    (replica_tensor * weights).sum().backward()
    # Each rank has a leaf of its own here; on one process the one leaf stands for all of them, and
    # its gradient is the mean of theirs.
    parts = DTensor.from_local(local_tensor.grad[None], device_mesh, [Shard(0)])
    total = parts.sum(0).redistribute(device_mesh, [Replicate()])
    keep(world, "from-local-gradient", weighted(handed_over(total / device_mesh.size())))


def check_a_module_by_a_function(world):
    import torch
    from torch.distributed import DeviceMesh
    from torch.distributed.tensor import distribute_module, distribute_tensor

    from tests.torch_bridge.distributed import rfc_model

    mesh = DeviceMesh(device_type="cpu", mesh=[[0, 1], [2, 3]])
    for partition_fn in rfc_model.partitions(distribute_tensor):
        model, x = rfc_model.model_and_input()
        distribute_module(model, mesh, partition_fn=partition_fn)
        losses = rfc_model.trained(model, distribute_tensor(x, mesh))
        # A vector is looked at as a row.
        numbers = {
            name: weighted(handed_over(t.detach().reshape(-1, t.shape[-1])))
            for name, t in model.named_parameters()
        }
        keep(world, partition_fn.__name__, {"losses": torch.as_tensor(losses), **numbers})
