"""The styles one by one: embeddings, inputs and outputs, layouts, plans, and what is refused."""

import inspect
import sys

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor import parallel as theirs

import isoshard as iso
from isoshard.torch_bridge.distributed.device_mesh import DeviceMesh
from isoshard.torch_bridge.distributed.tensor import parallel
from isoshard.torch_bridge.distributed.tensor.debug import CommDebugMode

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def on_dp(t, mesh):
    return iso.shard(t, mesh.get_jax_mesh(), iso.P("dp"))


def test_rows_of_an_embedding_are_not_gathered(mesh):
    table = parallel.parallelize_module(nn.Embedding(16, 8), mesh["tp"], parallel.RowwiseParallel())
    comm_mode = CommDebugMode()
    with comm_mode:
        kept = table(on_dp(torch.randint(0, 16, (4, 8)), mesh))
    assert kept.shape == (4, 8, 8)
    counts, sizes = comm_mode.get_comm_counts(), comm_mode.get_comm_bytes()
    assert counts["all_reduce"] == 1 and sizes["all_reduce"] == kept.nbytes // 2
    assert sizes["all_gather"] <= 2 * 8 * 8  # at most the numbers of the rows


class Two(nn.Module):
    def forward(self, a, number, *, b=None):
        return a * number, b


def test_inputs_by_place_and_name_and_outputs(mesh):
    module = parallel.parallelize_module(
        Two(),
        mesh["tp"],
        parallel.PrepareModuleInputOutput(
            input_layouts=(Replicate(), None),
            desired_input_layouts=(Shard(1), None),
            input_kwarg_layouts={"b": Shard(1)},
            desired_input_kwarg_layouts={"b": Replicate()},
            output_layouts=(Shard(1), Replicate()),
            desired_output_layouts=(Replicate(), Shard(1)),
        ),
    )
    a, b = on_dp(torch.randn(8, 8), mesh), on_dp(torch.randn(8, 8), mesh)
    out, other = module(a, 2.0, b=b)
    torch.testing.assert_close(out.cpu(), 2 * a.cpu())
    torch.testing.assert_close(other.cpu(), b.cpu())
    assert out.placements == (Shard(0), Replicate())
    assert other.placements == (Shard(0), Shard(1))


def test_partial_asks_for_nothing(mesh):
    linear = nn.Linear(16, 8)
    x = torch.randn(4, 16)
    expected = linear(x)
    parallel.parallelize_module(
        linear, mesh["tp"], parallel.RowwiseParallel(output_layouts=Partial())
    )
    torch.testing.assert_close(linear(on_dp(x, mesh)).detach().cpu(), expected.detach(), **CLOSE)


def test_an_uneven_activation_keeps_its_values(mesh):
    linear = nn.Linear(16, 8)
    x = torch.randn(4, 6, 16, requires_grad=True)
    (expected := linear(x)).square().sum().backward()
    style = parallel.ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(1))
    parallel.parallelize_module(linear, mesh["tp"], style)
    ours = on_dp(x.detach(), mesh).requires_grad_()
    (out := linear(ours)).square().sum().backward()
    torch.testing.assert_close(out.detach().cpu(), expected.detach(), **CLOSE)
    torch.testing.assert_close(ours.grad.cpu(), x.grad, **CLOSE)


def test_a_style_of_the_users(mesh):
    class Halve(parallel.ParallelStyle):
        def _apply(self, module, device_mesh):
            assert isinstance(device_mesh, DeviceMesh) and self.src_data_rank is None
            module.register_forward_hook(lambda _, inputs, output: output / 2)
            return module

    linear = nn.Linear(4, 4)
    expected = linear(torch.ones(1, 4)) / 2
    parallel.parallelize_module(linear, mesh["tp"], Halve(), src_data_rank=None)
    torch.testing.assert_close(linear(torch.ones(1, 4).to("jax")).cpu(), expected, **CLOSE)


def test_patterns_and_unmatched_names(mesh):
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8)), nn.Sequential(nn.Linear(8, 8)))
    plan = {"*.0": parallel.ColwiseParallel(), "1.w*": parallel.RowwiseParallel()}
    with pytest.warns(UserWarning, match=r"'1\.w\*' of parallelize_plan is skipped.*'w\*'"):
        parallel.parallelize_module(model, mesh["tp"], plan)
    assert [layer[0].weight.placements for layer in model] == [(Replicate(), Shard(0))] * 2


def test_no_plan_warns_and_a_mesh_of_two_dimensions_is_refused(mesh):
    with pytest.warns(UserWarning, match="no parallelize_plan"):
        parallel.parallelize_module(nn.Linear(4, 4), mesh["tp"])
    with pytest.raises(ValueError, match=r'2; pass one of them, as mesh\["tp"\]'):
        parallel.parallelize_module(nn.Linear(4, 4), mesh, parallel.ColwiseParallel())


def test_wrong_plans_change_nothing(mesh):
    rows, columns = parallel.RowwiseParallel(), parallel.ColwiseParallel()
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    for plan, error, message in (
        ("w1", TypeError, "dictionary of them by module name.*str"),
        ({"0": "colwise"}, TypeError, r"parallelize_plan\['0'\] must be a ParallelStyle"),
        ({"0": rows, "1": columns}, NotImplementedError, "nn.Embedding, and this is a ReLU"),
        ({"1": rows}, NotImplementedError, "RowwiseParallel.*ReLU"),
    ):
        with pytest.raises(error, match=message):
            parallel.parallelize_module(model, mesh["tp"], plan)
        assert model[0].weight.device.type == "cpu" and not model[0]._forward_hooks


def test_wrong_layouts_are_refused(mesh):
    prepare = parallel.PrepareModuleInput
    with pytest.raises(ValueError, match="should have same length! They are paired"):
        prepare(input_layouts=(Shard(0),), desired_input_layouts=(Shard(0), Replicate()))
    with pytest.raises(AssertionError, match="They are paired"):
        parallel.PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=())
    with pytest.raises(ValueError, match=r"name the same inputs.*\['a'\] and \['b'\]"):
        prepare(input_kwarg_layouts={"a": Shard(0)}, desired_input_kwarg_layouts={"b": Shard(0)})
    two = prepare(input_layouts=Shard(0), desired_input_layouts=Replicate())
    module = parallel.parallelize_module(Two(), mesh["tp"], two)
    with pytest.raises(ValueError, match="Two has 2 inputs, and input_layouts has 1"):
        module(torch.ones(4, device="jax"), 2)
    both = prepare(input_layouts=(Shard(0),) * 2, desired_input_layouts=(Replicate(),) * 2)
    module = parallel.parallelize_module(Two(), mesh["tp"], both)
    with pytest.raises(ValueError, match="input of Two, which is no tensor but a int"):
        module(torch.ones(4, device="jax"), 2)
    norm = parallel.parallelize_module(nn.Identity(), mesh["tp"], parallel.SequenceParallel())
    with pytest.raises(ValueError, match=r"first input of Identity.*list"):
        norm([1])
    with pytest.raises(IndexError, match="axis 1, and the tensor has 1"):
        norm(torch.ones(4, device="jax"))
    with pytest.raises(iso.ShardingError, match="on the jax device"):
        norm(torch.ones(4, 4))
    linear = nn.Linear(4, 4)
    style = parallel.ColwiseParallel(output_layouts=Partial("avg"))
    parallel.parallelize_module(linear, mesh["tp"], style)
    with pytest.raises(ValueError, match=r"P\(avg\) is not a placement"):
        linear(torch.ones(4, 4, device="jax"))


def test_signatures_and_defaults_are_torchs():
    for name in ("ColwiseParallel", "RowwiseParallel", "SequenceParallel"):
        mine, their = getattr(parallel, name), getattr(theirs, name)
        given, expected = (inspect.signature(kind).parameters for kind in (mine, their))
        assert list(given) == list(expected)
        assert [p.default for p in given.values()] == [p.default for p in expected.values()]
        assert repr(mine()) == repr(their())
    assert set(parallel.__all__) == set(theirs.__all__)
    assert sys.modules["torch.distributed.tensor.parallel"] is theirs  # nothing was replaced
    assert theirs.ColwiseParallel is not parallel.ColwiseParallel
