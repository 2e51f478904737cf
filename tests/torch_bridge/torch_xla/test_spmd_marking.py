"""Marks: torch_xla's strings, types and pieces for 117 layouts, and when a mark may follow another.

`goldens/spmd.json` was written by torch_xla 2.9.0 on eight CPU devices.
"""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as bridge
from isoshard import P, ShardingError, SpecError
from isoshard.torch_bridge.spmd import UnevenWarning, unwrap_sharded_tensor, wrap_as_sharded_tensor
from isoshard.torch_bridge.spmd.sharding_strings import sharding_spec_of, sharding_type_of
from isoshard.torch_bridge.torch_xla.distributed import spmd as xs

GOLDENS = json.loads((Path(__file__).parent / "goldens" / "spmd.json").read_text())


@pytest.fixture
def mesh():
    return xs.Mesh(range(8), (2, 4), ("x", "y"))


def data(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def _tuples(value):
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _marked(case, *, recorded: bool = False):
    mesh = xs.Mesh(case["ids"], tuple(case["mesh"]), case["names"])
    whole = torch.arange(float(np.prod(case["shape"]))).reshape(case["shape"])
    t = whole.to("jax")
    if recorded:
        t = t + 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnevenWarning)
        return whole, xs.mark_sharding(t, mesh, _tuples(case["spec"]))


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("number", range(3))
def test_strings_and_types_are_torch_xlas(number, recorded):
    for case in GOLDENS[number::3]:
        whole, t = _marked(case, recorded=recorded)
        assert (t.sharding_spec, t.sharding_type) == (case["string"], case["type"]), case
        assert sharding_spec_of(t) == case["string"] and sharding_type_of(t) == case["type"]
        mesh = xs.Mesh(case["ids"], tuple(case["mesh"]), case["names"])
        assert str(mesh.get_op_sharding(_tuples(case["spec"]))) == case["string"], case
        assert torch.equal(t.cpu(), whole)
        assert t.sharding_spec == case["string"]


@pytest.mark.parametrize("number", range(3))
def test_pieces_are_torch_xlas(number):
    for case in GOLDENS[number::3]:
        whole, t = _marked(case)
        shards = t.local_shards
        assert [s.shard_device for s in shards] == [f"CPU:{n}" for n in range(8)]
        assert [s.replica_id for s in shards] == case["replicas"], case
        for place, shard in enumerate(shards):
            assert list(shard.data.shape) == case["size"] and shard.rank == place
            if case["indices"] is None:
                assert shard.indices is ... and torch.equal(shard.data, whole)
                continue
            assert shard.indices == [slice(*pair, 1) for pair in case["indices"][place]], case
            want = whole[tuple(shard.indices)]
            assert torch.equal(shard.unpadded_data, want)
            assert shard.data.sum() == want.sum()  # the rest is zeros


# --- One mark after another ----------------------------------------------------------------------


def test_a_mark_is_in_place_and_returned(mesh):
    t = data(8, 4).to("jax")
    assert xs.mark_sharding(t, mesh, ("x", "y")) is t
    assert t.sharding_spec == "{devices=[2,4]0,1,2,3,4,5,6,7}" and t.mesh_shape == (2, 4)
    assert isinstance(t, xs.XLAShardedTensor)


@pytest.mark.parametrize("synced", [False, True])
def test_data_marked_whole_may_be_split(mesh, synced):
    x = data(8, 4)
    t = xs.mark_sharding(x.to("jax"), mesh, (None, None))
    if synced:
        bridge.sync()
    assert t.sharding_spec == "{replicated}"
    xs.mark_sharding(t, mesh, ("x", None))
    assert t.partition_spec == P("x") and iso.to_jax(t).sharding.spec == P("x")
    assert torch.equal(t.cpu(), x)


@pytest.mark.parametrize("synced", [False, True])
def test_data_marked_split_may_not_be_marked_otherwise(mesh, synced):
    t = xs.mark_sharding(data(8, 4).to("jax"), mesh, ("x", None))
    if synced:
        bridge.sync()
    assert xs.mark_sharding(t, mesh, (0, None)) is t  # the same, said otherwise
    for other in [("y", None), (None, None), (("x", "y"), None)]:
        with pytest.raises(ShardingError, match=r"marked P\('x',\) already.*clear_sharding"):
            xs.mark_sharding(t, mesh, other)
    assert t.partition_spec == P("x")


def test_of_the_marks_on_a_value_still_to_be_computed_the_last_counts(mesh):
    x = data(8, 8)
    t = x.to("jax") * 2
    for spec in [("x", None), (None, "y"), ("y", "x")]:
        xs.mark_sharding(t, mesh, spec)
    assert t.partition_spec == P("y", "x")
    bridge.sync()
    assert iso.to_jax(t).sharding.spec == P("y", "x")
    assert torch.equal(t.cpu(), x * 2)
    with pytest.raises(ShardingError, match="clear_sharding"):  # now it is data
        xs.mark_sharding(t, mesh, ("x", None))


def test_a_view_may_be_marked_again_and_again(mesh):
    x = data(8, 8)
    t = x.to("jax") * 1
    view = t.t()
    for spec in [("x", None), (None, "y")]:
        assert xs.mark_sharding(view, mesh, spec) is view
    assert torch.equal(view.cpu(), x.t()) and torch.equal(t.cpu(), x)


def test_clearing_makes_unmarked_and_whole(mesh):
    x = data(8, 4)
    t = xs.mark_sharding(x.to("jax"), mesh, ("x", "y"))
    assert xs.clear_sharding(t) is t
    assert t.sharding_spec == "" and t.sharding_type is t.partition_spec is t.placements is None
    assert all(torch.equal(shard.data, x) for shard in t.local_shards)
    t.add_(1)
    bridge.sync()
    assert t.sharding_spec == "" and torch.equal(t.cpu(), x + 1)
    xs.mark_sharding(t, mesh, ("y", "x"))
    assert t.partition_spec == P("y", "x") and torch.equal(t.cpu(), x + 1)
    plain = data(3)
    assert xs.clear_sharding(plain) is plain


def test_a_custom_mark_goes_over_another(mesh):
    """The string after it was observed on torch_xla 2.9."""
    x = data(8, 8)
    t = xs.mark_sharding(x.to("jax"), mesh, ("x", None))
    assert xs.annotate_custom_sharding(t, mesh, (None, "x")) is t
    assert t.sharding_spec == "{devices=[1,2,4]0,1,2,3,4,5,6,7 last_tile_dim_replicate}"
    wide = xs.Mesh(range(8), (4, 2), ("a", "b"))
    xs.annotate_custom_sharding(t, wide, ("a", "b"))
    bridge.sync()
    assert iso.to_jax(t).sharding.shard_shape((8, 8)) == (2, 4)
    assert torch.equal(t.cpu(), x)


def test_marking_inside_a_step_is_a_constraint_of_one_program(mesh, counted):
    x = data(8, 8).to("jax")
    w = xs.mark_sharding(data(8, 8).to("jax"), mesh, (None, "y"))
    h = xs.mark_sharding(x @ w, mesh, ("x", "y"))
    y = torch.relu(h).sum()
    assert counted("executions") == 0
    torch.testing.assert_close(y.cpu(), torch.relu(data(8, 8) @ data(8, 8)).sum())
    assert counted("executions") == 1


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (("x",), "1 entries for a tensor of rank 2"),
        ((0, 0), "mesh axis 'x' is used 2 times"),
        ((2, None), "there is no mesh axis 2"),
        ((-1, None), "there is no mesh axis -1"),
        (("q", None), "no mesh axis is called 'q'"),
        ((0.5, None), "0.5 is no axis name"),
        (((("x",),), None), "is no axis name"),
    ],
)
@pytest.mark.parametrize(
    "verb",
    [xs.mark_sharding, xs.annotate_custom_sharding, xs.mark_sharding_with_gradients],
    ids=lambda verb: verb.__name__,
)
def test_specs_that_do_not_fit(verb, spec, message, mesh):
    t = data(8, 4).to("jax")
    with pytest.raises(SpecError, match=message):
        verb(t, mesh, spec)
    assert t.sharding_spec == ""
    with pytest.raises(ShardingError, match=rf"{verb.__name__} takes.*\(8, 4\) is on cpu.*\.to\('"):
        verb(data(8, 4), mesh, ("x", None))


# --- Copies, wrapping, specs that wait -----------------------------------------------------------


@pytest.mark.parametrize("how", [copy.deepcopy, torch.clone, torch.zeros_like])
def test_copies_are_marked_alike(how, mesh):
    t = xs.mark_sharding(data(8, 4).to("jax"), mesh, ("x", "y"))
    assert how(t).sharding_spec == t.sharding_spec == "{devices=[2,4]0,1,2,3,4,5,6,7}"


def test_every_tensor_on_the_device_is_a_sharded_tensor(mesh):
    t = data(8, 4).to("jax")
    assert xs.wrap_if_sharded(t) is t and xs.wrap_if_sharded(7) == 7
    assert xs.XLAShardedTensor(t) is t and unwrap_sharded_tensor(t) is t
    assert wrap_as_sharded_tensor(t, (2, 4), (0, 1)).sharding_spec == (
        "{devices=[2,4]0,1,2,3,4,5,6,7}"
    )
    assert xs.XLAShardedTensor(data(8, 4).to("jax"), (8,), (0, None)).mesh_shape == (8,)
    leaf = xs.XLAShardedTensor(data(2).to("jax"), requires_grad=True)
    assert leaf.requires_grad and leaf.is_leaf
    with pytest.raises(ShardingError, match=r"on cpu cannot be an XLAShardedTensor.*\.to\('"):
        xs.XLAShardedTensor(data(8))


def test_a_spec_waits_for_tensors_of_its_rank(mesh):
    spec = xs.ShardingSpec(mesh, ("x", None), minibatch=True)
    t = data(8, 4).to("jax")
    assert spec.minibatch and spec.can_apply(t) and not spec.can_apply(t[0])
    assert spec.xla_spec(t[0]) is None
    found = spec.xla_spec(data(8, 4))
    assert found.minibatch and found.shape == (8, 4)
    assert str(found) == "{devices=[2,1,4]0,1,2,3,4,5,6,7 last_tile_dim_replicate}"
    spec.apply(t)
    assert t.sharding_spec == str(found)
    assert spec == xs.ShardingSpec(mesh, ("x", None), True)
    assert not xs.ShardingSpec(mesh, ("x", None)).minibatch
    with pytest.raises(SpecError, match="no mesh axis is called 'q'"):
        xs.ShardingSpec(mesh, ("q", None))


def test_tensors_elsewhere_have_no_string():
    assert sharding_spec_of(data(3)) == "" and sharding_type_of(data(3)) is None
    assert sharding_spec_of(data(3).to("jax")) == "" and sharding_type_of(data(3).to("jax")) is None


def test_results_get_their_layout_when_they_are_computed(mesh):
    t = xs.mark_sharding(data(8, 8).to("jax"), mesh, ("x", "y"))
    total = t.sum(0)
    assert sharding_spec_of(total) == ""
    bridge.sync()
    assert sharding_spec_of(total) == "{devices=[4,2]0,4,1,5,2,6,3,7 last_tile_dim_replicate}"


# --- What torch_xla 2.9 gets wrong ---------------------------------------------------------------

VIEWS = {
    "t": lambda t: t.t(),
    "T": lambda t: t.T,
    "index": lambda t: t[1],
    "slice": lambda t: t[2:5, ::2],
    "split": lambda t: t.split(3)[1],
    "chunk": lambda t: t.chunk(2, 1)[1],
    "permute": lambda t: t.permute(1, 0),
    "select": lambda t: t.select(1, 2),
    "unbind": lambda t: t.unbind(1)[3],
    "narrow": lambda t: t.narrow(0, 1, 4),
    "transpose": lambda t: t.transpose(0, 1),
    "view": lambda t: t.view(4, 16),
    "expand": lambda t: t[:1].expand(8, 8),
}


@pytest.mark.parametrize("synced", [False, True])
@pytest.mark.parametrize("name", VIEWS)
def test_views_of_marked_tensors(name, synced, mesh):
    x = data(8, 8)
    t = xs.mark_sharding(x.to("jax"), mesh, ("x", "y"))
    if synced:
        bridge.sync()
    view, want = VIEWS[name](t), VIEWS[name](x)
    assert torch.equal(view.cpu(), want) and torch.equal((view + 1).cpu(), want + 1)
    if name != "expand":
        view.mul_(2)
        VIEWS[name](x).mul_(2)
        assert torch.equal(t.cpu(), x) and t.partition_spec == P("x", "y")


def test_leaving_the_device(mesh, tmp_path):
    x = data(8, 8)
    t = xs.mark_sharding(x.to("jax"), mesh, ("x", "y"))
    assert type(t.cpu()) is torch.Tensor and torch.equal(t.cpu(), x)
    np.testing.assert_array_equal(t.numpy(), x.numpy())
    np.testing.assert_array_equal(np.asarray(t), x.numpy())
    assert t.tolist() == x.tolist() and t.global_tensor is t
    torch.save(t, tmp_path / "t.pt")
    assert torch.equal(torch.load(tmp_path / "t.pt", map_location="cpu"), x)
