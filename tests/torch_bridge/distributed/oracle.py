"""torch's own DTensor for all ranks in this process: the reference of the tests beside.

`LocalTensorMode` runs every rank's part of an operation; see its module in torch. For each rank it
also sets the random state of the accelerator, which is the `jax` device here, and no rank's.
"""

import contextlib
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import _local_tensor
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import init_device_mesh


@contextlib.contextmanager
def ranks(shape, names=None):
    """Within it DTensors of every rank are computed; gives the mesh."""
    world = int(torch.tensor(shape).prod())
    dist.init_process_group("fake", rank=0, world_size=world)
    try:
        with (
            mock.patch.object(_local_tensor, "_set_accelerator_rng_states", lambda states: None),
            LocalTensorMode(world),
        ):
            yield init_device_mesh("cpu", shape, mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


def local(parts):
    """One tensor per rank."""
    return LocalTensor(dict(enumerate(parts)))


def parts_of(tensor):
    """Each rank's tensor; a DTensor's local ones."""
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if not hasattr(tensor, "_local_tensors"):  # the same in every rank
        return [tensor.detach().clone() for _ in range(dist.get_world_size())]
    return [one(tensor._local_tensors[rank]) for rank in range(len(tensor._local_tensors))]


def one(tensor):
    """A tensor that is the same in every rank, or in rank 0."""
    while hasattr(tensor, "_local_tensors"):
        tensor = tensor._local_tensors[0]
    return tensor.detach().clone()
