"""`tensor.data = other` keeps the layout that a tensor was given, or says that it is lost."""

import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P


@pytest.fixture(scope="module")
def mesh():
    return iso.make_mesh((2, 4), ("x", "y"))


def parameter(mesh, spec=("x", None)):
    return iso.shard(torch.nn.Linear(8, 8), mesh, iso.Plan({"weight": spec, "bias": None})).weight


def spec(tensor):
    return iso.sharding_of(tensor).spec


NEW = {
    "unsharded": lambda mesh, old: torch.arange(64.0, device="jax").view(8, 8).clone(),
    "read before": lambda mesh, old: torch.arange(64.0).view(8, 8).to("jax") + 0,
    "computed": lambda mesh, old: old.detach() * 2,
    "computed of a whole one": lambda mesh, old: iso.shard(torch.ones(8, 8), mesh, P()) * 3,
    "another dtype": lambda mesh, old: torch.ones(8, 8, device="jax", dtype=torch.bfloat16),
    "another shape": lambda mesh, old: torch.ones(4, 2, device="jax"),
}


@pytest.mark.parametrize("new", NEW)
def test_the_layout_is_kept(mesh, new):
    weight = parameter(mesh)
    data = NEW[new](mesh, weight)
    if new == "read before":
        data.sum().item()
    want = data.cpu().clone()
    weight.data = data
    assert isinstance(weight, torch.nn.Parameter) and weight.dtype == want.dtype
    assert spec(weight) == P("x")
    torch.testing.assert_close(weight.detach().cpu(), want)
    data.mul_(2)  # still the same memory
    torch.testing.assert_close(weight.detach().cpu(), want * 2)
    assert iso.local_shards(weight)[0].data.shape[0] == want.shape[0] // 2
    weight.float().sum().backward()
    assert spec(weight.grad) == P("x")


def test_a_layout_of_its_own_is_taken(mesh):
    weight = parameter(mesh)
    weight.data = iso.shard(torch.ones(8, 8), mesh, P(None, "y"))
    assert spec(weight) == P(None, "y")
    weight.data = iso.shard(torch.ones(8, 8), mesh, P())
    assert spec(weight) == P()


@pytest.mark.parametrize(
    ("data", "shape"),
    [
        (lambda: torch.ones(7, 8, device="jax"), r"\(7, 8\)"),
        (lambda: torch.ones(16, 8, device="jax")[4:12], r"\(8, 8\)"),
    ],
)
def test_a_layout_that_does_not_fit_is_lost_and_told(mesh, data, shape):
    weight = parameter(mesh)
    match = rf"data of shape {shape} cannot be sharded as .*'x'.* lost.*iso\.shard\(new"
    with pytest.warns(iso.errors.ReplicationWarning, match=match):
        weight.data = data()


def test_of_a_compiled_step_and_of_plain_tensors(mesh):
    weight = parameter(mesh)
    step = xs.compile(lambda x: (weight * x).sum())
    for scale in (1.0, 2.0):
        weight.data = torch.ones(8, 8, device="jax") * scale
        assert step(torch.ones(8, device="jax")).item() == 64 * scale
        assert spec(weight) == P("x")
    plain = torch.ones(3, device="jax")
    plain.data = torch.ones(4, device="jax")
    assert plain.shape == (4,)
    module = torch.nn.Linear(8, 8).to("jax")
    iso.shard(module, mesh, P("x")).to(torch.bfloat16)
    assert spec(module.weight) == P("x") and module.weight.dtype == torch.bfloat16
