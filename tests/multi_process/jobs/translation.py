"""The two meshes are of the same processes, and blocks hold what real DTensors hold there."""

import isoshard as iso


def start():
    iso.distributed.init_distributed(timeout=60)


def mine(sharding, padded):
    """The index of this process's block."""
    return next(iter(sharding.addressable_devices_indices_map(padded).values()))


def check_a_rank_is_the_device_of_its_process(world):
    import jax
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from isoshard.torch_bridge.placements.translation import device_mesh_of, jax_mesh

    turned = torch.arange(world.size).reshape(-1, 2).T  # ranks ascend along each dimension
    given = DeviceMesh("cpu", turned, mesh_dim_names=("dp", "tp"))
    mesh = jax_mesh(given)
    assert [d.process_index for d in mesh.devices.flat] == turned.ravel().tolist()
    assert mesh.axis_names == ("dp", "tp") and jax.process_index() == world.rank
    assert device_mesh_of(mesh) is given


def check_a_new_mesh_has_working_groups_once(world):
    import numpy as np
    import torch
    import torch.distributed as dist

    from isoshard.torch_bridge.placements.translation import device_mesh_of, jax_mesh

    grid = np.array(iso.make_mesh((world.size,), ("x",)).devices).reshape(2, -1).T
    mesh = iso.Mesh(grid, ("a", "b"))
    made = device_mesh_of(mesh)
    assert made is device_mesh_of(mesh) and made.device_type == "cpu"
    assert jax_mesh(made) == mesh
    owners = [[device.process_index for device in row] for row in grid]
    assert made.mesh.tolist() == owners
    total = torch.tensor([float(world.rank)])
    dist.all_reduce(total, group=made.get_group("b"))
    assert total.item() == sum(next(row for row in owners if world.rank in row))


def check_a_mesh_of_some_processes(world):
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    from isoshard.torch_bridge.placements.translation import device_mesh_of, jax_mesh

    whole = init_device_mesh("cpu", (world.size // 2, 2), mesh_dim_names=("dp", "tp"))
    row = jax_mesh(whole["tp"])
    pair = [world.rank // 2 * 2, world.rank // 2 * 2 + 1]
    assert [d.process_index for d in row.devices.flat] == pair and row.axis_names == ("tp",)
    assert device_mesh_of(row) == whole["tp"]
    first = iso.Mesh(jax_mesh(whole).devices[:1, :1], ("dp", "tp"))
    alone = device_mesh_of(first)  # every process takes part, rank 0 only is in it
    assert (alone.get_coordinate() is not None) == (world.rank == 0)
    assert torch.equal(alone.mesh, torch.tensor([[0]]))


def check_blocks_are_those_of_dtensor(world):
    import numpy as np
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    from isoshard.torch_bridge.placements.translation import layout_of, local_shape_and_offset

    mesh = init_device_mesh("cpu", (2, world.size // 2), mesh_dim_names=("dp", "tp"))
    for rows, placements in [
        (8, (Shard(0), Shard(0))),
        (8, (_StridedShard(0, split_factor=world.size // 2), Shard(0))),
        (8, (Shard(1), Shard(0))),
        (8, (Replicate(), Shard(0))),
        (5, (Shard(0), Shard(0))),
        (5, (Replicate(), Shard(0))),
        (3, (Shard(0), Shard(1))),
    ]:
        whole = torch.arange(4.0 * rows).reshape(rows, 4)
        local = distribute_tensor(whole, mesh, placements).to_local()
        layout = layout_of(placements, mesh, (rows, 4))
        shape, offset = local_shape_and_offset(
            (rows, 4), mesh.shape, placements, mesh.get_coordinate()
        )
        here = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
        assert torch.equal(local, whole[here]), (placements, local)
        cut = mine(layout.sharding, layout.padded)
        if layout.is_even:
            assert torch.equal(local, whole[cut])
            continue
        padded = np.zeros(layout.block, np.float32)
        padded[tuple(map(slice, local.shape))] = local
        array = iso.from_local(padded, layout.sharding.mesh, layout.sharding.spec)
        uneven = iso.UnevenArray(array, layout.shape, layout.sizes)
        valid = uneven.mask()
        assert valid.sharding == layout.sharding
        counted = np.asarray(valid.addressable_data(0))
        assert counted.sum() == local.numel()
        assert counted[tuple(map(slice, local.shape))].all()
