"""A script started without any launcher."""

import isoshard as iso


def start():
    found = iso.distributed.init_distributed()
    assert found == iso.distributed.Processes(0, 1, 0, None)
    assert iso.distributed.init_distributed() is found


def check_dtensors_work(world):
    import torch
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (1,))
    placed = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    assert placed.full_tensor().tolist() == [0, 1, 2, 3]


def check_jax_is_left_as_it_is(world):
    import jax

    assert not jax.distributed.is_initialized()


def check_it_agrees_with_itself(world):
    from isoshard.core.processes.agreement import assert_equal

    assert_equal("the mesh", (1,))
