"""Marks: torch_xla's strings, types and pieces for 117 layouts; marks after marks; uneven axes.

`goldens/spmd.json` was written by torch_xla 2.9.0 on eight CPU devices.
"""

from __future__ import annotations

import copy
import itertools
import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as bridge
from isoshard import P, ShardingError
from isoshard.errors import SpecError, UnevenError
from isoshard.torch_bridge.spmd import UnevenWarning, unwrap_sharded_tensor, wrap_as_sharded_tensor
from isoshard.torch_bridge.spmd.reported_shardings import sharding_spec_of, sharding_type_of
from isoshard.torch_xla_bridge.torch_xla.distributed import spmd as xs

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
def test_strings_and_types_are_torch_xlas(recorded):
    cases = sorted(GOLDENS[recorded::4], key=lambda case: case["ids"])
    for _, alike in itertools.groupby(cases, key=lambda case: case["ids"]):  # in one program
        marked = [(case, *_marked(case, recorded=recorded)) for case in alike]
        for case, _, t in marked:
            assert (t.sharding_spec, t.sharding_type) == (case["string"], case["type"]), case
            assert sharding_spec_of(t) == case["string"] and sharding_type_of(t) == case["type"]
            mesh = xs.Mesh(case["ids"], tuple(case["mesh"]), case["names"])
            assert str(mesh.get_op_sharding(_tuples(case["spec"]))) == case["string"], case
        bridge.sync()
        for case, whole, t in marked:
            assert torch.equal(t.cpu(), whole), case
            assert t.sharding_spec == case["string"], case


def test_pieces_are_torch_xlas():
    for case in GOLDENS:
        whole, t = _marked(case)
        shards = t.local_shards
        assert t.sharding_spec == case["string"]
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


def test_data_marked_whole_may_be_split(mesh):
    x = data(8, 4)
    for synced in (False, True):
        t = xs.mark_sharding(x.to("jax"), mesh, (None, None))
        if synced:
            bridge.sync()
        assert t.sharding_spec == "{replicated}"
        assert xs.mark_sharding(t, mesh, ("x", None)) is t and isinstance(t, xs.XLAShardedTensor)
        assert t.partition_spec == P("x") and iso.to_jax(t).sharding.spec == P("x")
        assert torch.equal(t.cpu(), x) and t.mesh_shape == (2, 4)


def test_data_marked_split_may_not_be_marked_otherwise(mesh):
    t = xs.mark_sharding(data(8, 4).to("jax"), mesh, ("x", None))
    for _ in range(2):
        assert xs.mark_sharding(t, mesh, (0, None)) is t  # the same, said otherwise
        for other in [("y", None), (None, None), (("x", "y"), None)]:
            with pytest.raises(ShardingError, match=r"marked P\('x',\) already.*clear_sharding"):
                xs.mark_sharding(t, mesh, other)
        assert t.partition_spec == P("x")
        bridge.sync()


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
    y = torch.relu(h).sum(0)
    assert sharding_spec_of(y) == sharding_spec_of(x) == sharding_spec_of(data(3)) == ""
    assert sharding_type_of(x) is sharding_type_of(data(3)) is None
    assert counted("executions") == 0
    torch.testing.assert_close(y.cpu(), torch.relu(data(8, 8) @ data(8, 8)).sum(0))
    assert sharding_spec_of(y) == "{devices=[4,2]0,4,1,5,2,6,3,7 last_tile_dim_replicate}"
    assert counted("executions") == 1


@pytest.mark.parametrize(
    "verb",
    [xs.mark_sharding, xs.annotate_custom_sharding, xs.mark_sharding_with_gradients],
    ids=lambda verb: verb.__name__,
)
def test_specs_that_do_not_fit(verb, mesh):
    t = data(8, 4).to("jax")
    for spec, message in (
        (("x",), "1 entries for a tensor of rank 2"),
        ((0, 0), "mesh axis 'x' is used 2 times"),
        ((2, None), "there is no mesh axis 2"),
        ((-1, None), "there is no mesh axis -1"),
        (("q", None), "no mesh axis is called 'q'"),
        ((0.5, None), "0.5 is no axis name"),
        (((("x",),), None), "is no axis name"),
    ):
        with pytest.raises(SpecError, match=message):
            verb(t, mesh, spec)
    assert t.sharding_spec == ""
    with pytest.raises(ShardingError, match=rf"{verb.__name__} takes.*\(8, 4\) is on cpu.*\.to\('"):
        verb(data(8, 4), mesh, ("x", None))


# --- Copies, wrapping, specs that wait -----------------------------------------------------------


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


# --- What torch_xla 2.9 gets wrong ---------------------------------------------------------------


def test_leaving_the_device(mesh, tmp_path):
    x = data(8, 8)
    t = xs.mark_sharding(x.to("jax"), mesh, ("x", "y"))
    assert type(t.cpu()) is torch.Tensor and torch.equal(t.cpu(), x)
    np.testing.assert_array_equal(t.numpy(), x.numpy())
    np.testing.assert_array_equal(np.asarray(t), x.numpy())
    assert t.tolist() == x.tolist() and t.global_tensor is t
    torch.save(t, tmp_path / "t.pt")
    assert torch.equal(torch.load(tmp_path / "t.pt", map_location="cpu"), x)


# --- Axes that do not divide ---------------------------------------------------------------------


ENTRIES = (None, "x", "y", ("x", "y"), ("y", "x"))


@pytest.fixture
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnevenWarning)
        yield


def test_the_warning_names_what_does_not_divide_and_is_counted(mesh, counted):
    t = data(7, 4).to("jax")
    with pytest.warns(UnevenWarning, match=r"axis 0 has size 7.*2 shards.*Pad it to 8.*replicated"):
        xs.mark_sharding(t, mesh, ("x", "y"))
    assert counted("uneven_marks") == 1
    assert t.named_sharding.spec == P(None, "y")
    assert t.partition_spec == P("x", "y") and t.sharding_type == xs.ShardingType.TILED
    assert iso.to_jax(t).sharding.spec == P(None, "y")
    xs.mark_sharding(t, mesh, ("x", "y"))  # again the same: nothing to tell
    assert counted("uneven_marks") == 1


def test_the_warning_comes_once_per_line_of_user_code(mesh):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default", UnevenWarning)
        for _ in range(3):
            xs.mark_sharding(data(7).to("jax"), mesh, ("x",))
        xs.mark_sharding(data(7).to("jax"), mesh, ("x",))
    assert len(caught) == 2 and all(one.filename == __file__ for one in caught)
    assert caught[1].lineno - caught[0].lineno == 1


def test_values_are_right_whatever_the_spec(mesh, quiet):
    found = []
    for number, spec in enumerate(itertools.product(ENTRIES, ENTRIES)):
        used = "".join(str(entry) for entry in spec)
        if used.count("x") > 1 or used.count("y") > 1:
            continue
        x = data(*((7, 3), (1, 9), (6, 5))[number % 3])
        t = x.to("jax") * 1 if number % 2 else x.to("jax")
        xs.mark_sharding(t, mesh, spec)
        text = t.sharding_spec
        found.append((torch.tanh(t) @ t.t() + t.sum(1), torch.tanh(x) @ x.t() + x.sum(1)))
        t.add_(1)
        found.append((t, x + 1))
        assert t.sharding_spec == text
    for got, want in found:  # all in one program
        torch.testing.assert_close(got.cpu(), want)


def test_blocks_of_a_product_are_where_they_belong(quiet):
    """Found by the fuzzer: columns 2:4 and 4:6 were exchanged."""
    mesh = iso.make_mesh((2, 2, 2), ("p", "q", "s"))
    x, w = data(3, 8), data(8, 8)
    left = xs.mark_sharding(x.to("jax"), mesh, (("s", "p"), "q"))
    right = xs.mark_sharding(w.to("jax"), mesh, ("p", None))
    h = xs.mark_sharding(left @ right, mesh, ("p", ("s", "q")))
    torch.testing.assert_close((h * 1).cpu(), x @ w)


def test_a_mark_that_splits_nothing_may_be_followed_by_an_uneven_one(mesh, quiet):
    with pytest.raises(UnevenError, match="Pad it to 8"):
        iso.shard(data(7), mesh.get_jax_mesh(), P("x"))
    t = xs.mark_sharding(data(7).to("jax"), mesh, (None,))
    xs.mark_sharding(t, mesh, ("x",))
    assert copy.deepcopy(t).sharding_spec == t.sharding_spec
    assert t.partition_spec == P("x")
    with pytest.raises(ValueError, match=r"marked P\('x',\) already"):
        xs.mark_sharding(t, mesh, ("y",))


# --- Pieces --------------------------------------------------------------------------------------


def marked(x: torch.Tensor, mesh: xs.Mesh, spec: tuple) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnevenWarning)
        return xs.mark_sharding(x.to("jax"), mesh, spec)


def test_a_piece_is_four_things():
    shard = xs.XLAShard(torch.arange(4.0), [slice(4, 7, 1)], "CPU:1", 0)
    assert (shard.rank, shard.unpadded_data.tolist()) == (1, [0, 1, 2])
    shard.unpadded_data = torch.ones(3)
    assert shard.data.tolist() == [1, 1, 1, 3]
    whole = xs.XLAShard(torch.arange(2.0), ..., "CPU:0", 0)
    whole.unpadded_data = torch.zeros(2)
    assert whole.unpadded_data.tolist() == [0, 0]


def test_pieces_are_snapshots(mesh):
    t = marked(torch.arange(16.0), mesh, (("x", "y"),))
    before = t.local_shards
    t.mul_(10)
    bridge.sync()
    assert [s.data.tolist() for s in before] == [[2 * n, 2 * n + 1] for n in range(8)]
    for shard in t.local_shards:
        shard.data.zero_()
    assert t.tolist() == [10.0 * n for n in range(16)]


def test_data_have_pieces_at_once_and_values_after_execution(mesh, counted):
    t = marked(torch.arange(8.0), mesh, ("y",))
    assert [s.data.tolist() for s in t.local_shards][:4] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert counted("executions") == 0
    u = t + 1
    assert u.local_shards is None
    bridge.sync()
    assert u.local_shards[1].data.tolist() == [3, 4]
    drawn = torch.randn(16, 3, device="jax")
    made = marked(drawn * 2, mesh, ("y", None))
    assert counted("executions") == 1
    assert [s.data.shape for s in made.local_shards] == [(4, 3)] * 8
    assert counted("executions") == 2
    whole = made.cpu()
    for shard in made.local_shards:
        assert torch.equal(shard.data, whole[tuple(shard.indices)])


def test_pieces_keep_the_dtype_and_can_be_loaded(mesh):
    for dtype, shape, spec in (
        (torch.float32, (7, 3), ("y", "x")),
        (torch.bfloat16, (8, 4), (None, "x")),
        (torch.int64, (8, 4), ("x", "y")),
        (torch.bool, (7, 3), ("y", "x")),
    ):
        x = (torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * 5).to(dtype)
        t = marked(x, mesh, spec)
        shards = t.local_shards
        assert {shard.data.dtype for shard in shards} == {dtype}
        turned = torch.logical_not if dtype == torch.bool else torch.neg
        for shard in shards:
            shard.unpadded_data = turned(shard.unpadded_data)
        text = t.sharding_spec
        t.load_local_shards_(shards[::-1])  # in any order
        assert torch.equal(t.cpu(), turned(x)) and t.sharding_spec == text
        assert iso.to_jax(t).sharding.spec == t.named_sharding.spec
        assert [s.data.tolist() for s in t.local_shards] == [s.data.tolist() for s in shards]
    weight = torch.nn.Parameter(marked(torch.zeros(8, 4), mesh, ("y", None)))
    shards = weight.local_shards
    for shard in shards:
        shard.data.fill_(1)
    with torch.no_grad():
        weight.load_local_shards_(shards)
    assert weight.sum() == 32 and isinstance(weight, torch.nn.Parameter)


def test_what_cannot_be_loaded(mesh):
    t = marked(torch.arange(8.0), mesh, (("x", "y"),))
    shards = t.local_shards
    with pytest.raises(RuntimeError, match=r"7 shards.*8 devices.*one for each"):
        t.load_local_shards_(shards[:-1])
    with pytest.raises(RuntimeError, match="8 shards"):
        t.load_local_shards_([*shards[:-1], shards[0]])
    wide = [xs.XLAShard(torch.ones(2), s.indices, s.shard_device, 0) for s in shards]
    with pytest.raises(RuntimeError, match=r"has the shape \(1,\).*have \[\(2,\)\]"):
        t.load_local_shards_(wide)
    whole = marked(torch.arange(8.0), mesh, (None,))
    with pytest.raises(RuntimeError, match="that is replicated has no shards"):
        whole.load_local_shards_(whole.local_shards)
    with pytest.raises(RuntimeError, match=r"on no mesh.*mark it first"):
        torch.ones(8).to("jax").load_local_shards_(shards)
    assert t.tolist() == list(range(8))


def test_pieces_of_one_device_of_jax_and_of_views(mesh):
    t = torch.arange(4.0).to("jax")
    (shard,) = t.local_shards
    assert (shard.indices, shard.shard_device, shard.replica_id) == (..., "CPU:0", 0)
    assert shard.data.tolist() == [0, 1, 2, 3]
    t = iso.shard(torch.arange(16.0).reshape(8, 2), mesh.get_jax_mesh(), P("y"))  # and from JAX
    assert [s.replica_id for s in t.local_shards] == [0] * 4 + [1] * 4
    for shard in t.t().local_shards:  # of a view
        where = ... if shard.indices is ... else tuple(shard.indices)
        assert torch.equal(shard.data, torch.arange(16.0).reshape(8, 2).t()[where])
