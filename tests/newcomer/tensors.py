"""Mistakes with torch tensors on the device: a user of torch, or of torch_xla."""

import numpy as np
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P

from .mistakes import mistake


def ones(*shape, **kwargs):
    return torch.ones(*shape, device="jax", **kwargs)


@mistake(iso.DeviceError, "jax:9", "one device", "iso.shard")
def to_a_device_that_is_not_there(at):
    torch.ones(4).to("jax:9")


@mistake(iso.DeviceError, "jax:3", "one device", "iso.shard")
def made_on_a_device_that_is_not_there(at):
    torch.ones(4, device="jax:3")


@mistake(iso.DeviceError, "jax:1", "one device", "iso.shard")
def a_module_to_a_device_that_is_not_there(at):
    torch.nn.Linear(2, 2).to("jax:1")


@mistake(iso.DeviceError, "jax:5", "one device")
def numbers_on_a_device_that_is_not_there(at):
    torch.tensor([1.0, 2.0], device="jax:5")


@mistake(iso.DeviceError, "jax:5", "one device")
def a_range_on_a_device_that_is_not_there(at):
    torch.arange(3, device="jax:5")


@mistake(iso.DeviceError, "jax:5", "one device")
def random_numbers_on_a_device_that_is_not_there(at):
    torch.randn(3, device="jax:5")


@mistake(iso.DeviceError, "jax:2", "one device")
def a_default_device_that_is_not_there(at):
    with torch.device("jax:2"):
        torch.nn.Linear(2, 2)


@mistake(iso.DeviceError, "jax:7", "one device")
def torch_jax_set_device(at):
    torch.jax.set_device(7)


@mistake(RuntimeError, "cpu", "jax", ".to(")
def two_devices_in_one_operation(at):
    ones(4) + torch.ones(4)


@mistake(RuntimeError, "cpu", "jax", ".to(")
def a_model_on_the_device_and_its_input_not(at):
    torch.nn.Linear(4, 4).to("jax")(torch.ones(2, 4))


@mistake(
    RuntimeError,
    "the optimizer's state is on cpu",
    "optimizer.load_state_dict(optimizer.state_dict())",
)
def an_optimizer_whose_state_stayed_on_the_cpu(at):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    model.to("jax")
    model(ones(2, 4)).sum().backward()
    optimizer.step()


@mistake(
    RuntimeError,
    "the optimizer's state is on cpu",
    "optimizer.load_state_dict(optimizer.state_dict())",
)
def an_optimizer_whose_state_stayed_when_its_model_was_laid_out(at):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    iso.shard(model, at.mesh, P())
    model(ones(2, 4)).sum().backward()
    optimizer.step()


@mistake(RuntimeError, "[4, 3]", "[4, 5]")
def shapes_that_do_not_meet(at):
    ones(4, 3) + ones(4, 5)


@mistake(RuntimeError, "must have same reduction dim", "[2, 3] X [4, 5]")
def matrices_that_do_not_meet(at):
    ones(2, 3) @ ones(4, 5)


@mistake(RuntimeError, "detach()", "grad")
def numpy_of_a_tensor_with_a_graph(at):
    ones(4, requires_grad=True).cpu().numpy()


@mistake(TypeError, "takes the tensor first", "mark_sharding(t, mesh, spec)")
def mark_sharding_mesh_first(at):
    xs.mark_sharding(at.mesh, ones(8, 4), P("x"))


@mistake(TypeError, "given was P: P('x',)", "stands before the spec")
def mark_sharding_spec_before_mesh(at):
    xs.mark_sharding(ones(8, 4), P("x"), at.mesh)


@mistake(iso.ShardingError, "cpu", ".to(")
def mark_what_is_on_the_cpu(at):
    xs.mark_sharding(torch.ones(8, 4), at.mesh, ("x", None))


@mistake(iso.SpecError, "'z'", "'x' (2), 'y' (4)")
def mark_by_an_axis_that_the_mesh_lacks(at):
    xs.mark_sharding(ones(8, 4), at.mesh, ("z", None))


@mistake(iso.SpecError, "has 4 entries for a tensor of rank 3", "give one entry per axis")
def mark_with_fewer_entries_than_axes(at):
    xs.mark_sharding(ones(8, 4, 2), at.mesh, ("x",) * 4)


@mistake(iso.DeviceError, "needs 16 devices, there are 8", "isoshard.simulate_devices(16)")
def a_mesh_of_torch_xla_larger_than_the_machine(at):
    xs.Mesh(np.arange(16), (4, 4), ("x", "y"))


@mistake(iso.ShardingError, "8", "(2, 2)")
def a_mesh_of_torch_xla_whose_shape_does_not_fit(at):
    xs.Mesh(np.arange(8), (2, 2), ("x", "y"))


@mistake(iso.ShardingError, "require grad", "x.detach()")
def lay_out_what_was_computed(at):
    weight = torch.nn.Linear(4, 4).weight
    iso.shard(weight * 2, at.mesh, P())


@mistake(iso.ShardingError, "Linear has no tensors called wieght", "weight, bias")
def a_dictionary_of_specs_with_a_misspelt_name(at):
    iso.shard(torch.nn.Linear(8, 8), at.mesh, {"wieght": P("x"), "bias": P()})


@mistake(iso.UnevenError, "bias", "axis 0 has size 6", "8")
def one_spec_for_a_module_that_does_not_divide(at):
    iso.shard(torch.nn.Linear(8, 6), at.mesh, P("y"))


@mistake(TypeError, "full takes a tensor", "reshard(module, P())")
def gather_a_module(at):
    iso.full(torch.nn.Linear(2, 2))


@mistake(
    iso.ShardingError,
    "meshes that number the devices differently",
    "isoshard.reshard(tensor, spec, mesh)",
)
def tensors_on_two_meshes(at):
    other = iso.make_mesh((8,), ("z",), devices=list(at.mesh.devices.flat)[::-1])
    a = iso.shard(torch.ones(8, 4), at.mesh, P("x"))
    b = iso.shard(torch.ones(8, 4), other, P("z"))
    (a + b).sum().item()


@mistake(NotImplementedError, "nested", "mask")
def a_nested_tensor(at):
    torch.nested.nested_tensor([ones(2), ones(3)])


@mistake(NotImplementedError, "sparse tensors are not on the jax device", ".to_dense()")
def a_sparse_tensor(at):
    torch.eye(3).to_sparse().to("jax")


@mistake(RuntimeError, "a leaf Variable that requires grad", "in-place operation")
def a_write_into_a_leaf(at):
    ones(3, requires_grad=True).add_(1)


@mistake(RuntimeError, "cpu", "Generator")
def a_generator_of_another_device(at):
    torch.randn(3, device="jax", generator=torch.Generator())


@mistake(IndexError, "5", "3")
def an_index_out_of_range(at):
    ones(3)[5]
