"""The examples of the DTensor RFC on one process's mesh, in the spelling of today.

Corrected are: `distributed.empty(..)` (it is in `torch.distributed.tensor`, as `DTensor` and
`Shard` are), `DeviceMesh(device_type="cuda", [..])` (a positional argument after a keyword; and
the devices are `"jax"`), `init_process_group` (there is one process), `def MyModule` (a class),
`super.__init__()`, partition functions of two arguments (they get the mesh too), a model and a
`device_mesh` that nobody made, and one placement for a mesh of two dimensions. `mod._apply(
to_dist_tensor)` works as written here; torch 2.13 refuses it for its own DTensor ("Couldn't swap"),
so the twin under torchrun, `tests/multi_process/jobs/rfc.py`, registers each parameter.
"""

import pytest
import torch
from torch import nn

import isoshard.torch_bridge as xs
from isoshard.torch_bridge.distributed import DeviceMesh
from isoshard.torch_bridge.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from tests.torch_bridge.distributed import rfc_model

WORLD = 4


@pytest.fixture
def device_mesh():
    return DeviceMesh(device_type="jax", mesh=[0, 1, 2, 3])


def pieces(tensor):
    xs.sync()
    return [shard.data for shard in tensor.local_shards]


def test_from_a_local_tensor_and_redistributed(device_mesh):
    local_tensor = torch.randn((8, 8), requires_grad=True)
    rowwise_tensor = DTensor.from_local(local_tensor, device_mesh, [Shard(0)])
    colwise_tensor = rowwise_tensor.redistribute(device_mesh, [Shard(1)])
    replica_tensor = colwise_tensor.redistribute(device_mesh, [Replicate()])
    assert rowwise_tensor.shape == (32, 8)
    whole = local_tensor.detach().repeat(4, 1)
    for tensor, shape in (
        (rowwise_tensor, (8, 8)),
        (colwise_tensor, (32, 2)),
        (replica_tensor, (32, 8)),
    ):
        assert torch.equal(tensor.detach().cpu(), whole)
        assert [piece.shape for piece in pieces(tensor)] == [shape] * WORLD
    weights = torch.randn(32, 8)
    (replica_tensor * weights.to("jax")).sum().backward()
    # It stands for four tensors with a gradient each.
    torch.testing.assert_close(local_tensor.grad, weights.reshape(4, 8, 8).mean(0))


shard_params, shard_fc = rfc_model.partitions(distribute_tensor)


def shard_params_as_written(mod_name, mod, mesh):
    def to_dist_tensor(t):
        return distribute_tensor(t, mesh, [Shard(0), Replicate()])

    mod._apply(to_dist_tensor)


@pytest.mark.parametrize(
    ("partition_fn", "split"),
    [
        (shard_params_as_written, {"fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"}),
        (shard_fc, {"fc1.weight"}),
    ],
)
def test_a_module_by_a_function(partition_fn, split):
    mesh = DeviceMesh(device_type="jax", mesh=[[0, 1], [2, 3]])
    model, x = rfc_model.model_and_input()
    reference, _ = rfc_model.model_and_input()
    sharded_module = distribute_module(model, mesh, partition_fn=partition_fn)
    assert sharded_module is model
    for name, parameter in model.named_parameters():
        first = Shard(0) if name in split else Replicate()
        assert parameter.placements == (first, Replicate()), name
        assert isinstance(parameter, nn.Parameter) and parameter.is_leaf
    losses = rfc_model.trained(model, distribute_tensor(x, mesh))
    torch.testing.assert_close(losses, rfc_model.trained(reference, x))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach().cpu(), reference.get_parameter(name).detach())
        assert parameter.placements[0] == (Shard(0) if name in split else Replicate())


def test_a_meta_tensor_is_made_in_pieces(device_mesh):
    """`tensor` could be a "meta" tensor, says the RFC of distribute_tensor."""
    made = distribute_tensor(torch.empty(8, 12, device="meta"), device_mesh, [Shard(1)])
    assert not made.is_meta and made.placements == (Shard(1),)
    assert [piece.shape for piece in pieces(made)] == [(8, 3)] * WORLD
