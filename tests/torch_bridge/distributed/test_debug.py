"""CommDebugMode and visualize_sharding."""

import json

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import isoshard as iso
import isoshard.torch_bridge as xs
from benchmarks import collectives as counted
from isoshard.core.runtime.hlo_collectives import Collective, axes_of, collectives
from isoshard.torch_bridge.distributed.device_mesh import init_device_mesh
from isoshard.torch_bridge.distributed.tensor import distribute_tensor
from isoshard.torch_bridge.distributed.tensor.debug import CommDebugMode, visualize_sharding

P = jax.sharding.PartitionSpec
funcol = torch.ops.c10d_functional


@pytest.fixture
def mesh():
    return init_device_mesh("jax", (2, 4), mesh_dim_names=("dp", "tp"))


def product(mesh):
    """Operands of a product that is summed over tp."""
    a = distribute_tensor(torch.ones(8, 16), mesh, [Shard(0), Shard(1)])
    b = distribute_tensor(torch.ones(16, 4), mesh, [Replicate(), Shard(0)])
    return a, b


def test_counts_under_torchs_names(mesh):
    a, b = product(mesh)
    comm_mode = CommDebugMode()
    with comm_mode:
        total = a @ b
    assert comm_mode.comm_counts == comm_mode.get_comm_counts() == {"all_reduce": 1}
    assert comm_mode.comm_counts[funcol.all_reduce] == 1
    assert comm_mode.comm_counts[funcol.all_gather_into_tensor] == 0
    whole = comm_mode.comm_module_counts["Global"]
    assert whole["forward"][funcol.all_reduce] == 1 and whole["backward"][funcol.all_reduce] == 0
    assert total.shape == (8, 4)


def test_each_run_counts(mesh):
    a, b = product(mesh)
    step = xs.compile(torch.mm)
    step(a, b)
    comm_mode = CommDebugMode()
    with comm_mode:
        for _ in range(3):
            step(a, b)
    assert comm_mode.get_comm_counts() == {"all_reduce": 3}
    assert comm_mode.get_comm_bytes() == {"all_reduce": 3 * 4 * 4 * 4}
    assert comm_mode.get_axis_counts() == {("all_reduce", ("tp",)): 3}
    assert comm_mode.get_total_counts() == 3 and len(comm_mode.runs) == 3
    assert repr(comm_mode) == "CommDebugMode(get_total_counts()=3)"


def test_only_what_is_recorded_inside_counts(mesh):
    a, b = product(mesh)
    before = a @ b
    comm_mode = CommDebugMode()
    with comm_mode:
        pass
    assert comm_mode.get_total_counts() == 0
    with comm_mode:
        inside = a @ b
    after = a @ b
    xs.sync()
    assert comm_mode.get_total_counts() == 1
    assert before.equal(inside) and inside.equal(after)
    assert comm_mode.get_total_counts() == 1


def test_it_starts_from_zero_each_time(mesh):
    a, b = product(mesh)
    comm_mode = CommDebugMode()
    for _ in range(2):
        with comm_mode:
            kept = a @ b
        assert comm_mode.get_total_counts() == 1 and kept.shape == (8, 4)


def test_an_error_inside_comes_through_and_counting_stops(mesh):
    a, b = product(mesh)
    comm_mode = CommDebugMode()
    with pytest.raises(ZeroDivisionError), comm_mode:
        kept = a @ b
        xs.sync()
        _ = 1 / 0
    assert comm_mode.get_total_counts() == 1
    again = a @ b
    xs.sync()
    assert comm_mode.get_total_counts() == 1 and kept.equal(again)


def test_torchs_operators_are_names_too(mesh):
    a, b = product(mesh)
    comm_mode = CommDebugMode()
    with comm_mode:
        kept = (a @ b).redistribute(mesh, [Replicate(), Replicate()])
    counts = comm_mode.get_comm_counts()
    assert kept.placements == (Replicate(), Replicate())
    assert counts[funcol.all_reduce] == counts["all_reduce"] == 1
    assert counts[funcol.all_gather_into_tensor] == counts["all_gather"] == 1
    assert counts[funcol.reduce_scatter_tensor] == 0
    assert comm_mode.get_axis_counts()["all_gather", ("dp",)] == 1


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        ([Shard(0)], [Replicate()], "all_gather"),
        ([Shard(0)], [Shard(1)], "all_to_all"),
        ([Replicate()], [Shard(1)], None),
    ],
)
def test_kinds_of_redistribution(before, after, kind):
    mesh = init_device_mesh("jax", (8,))
    x = distribute_tensor(torch.randn(64, 64), mesh, before)
    comm_mode = CommDebugMode()
    with comm_mode:
        y = x.redistribute(mesh, after)
    assert comm_mode.get_comm_counts() == ({kind: 1} if kind else {})
    assert y.equal(x)


def test_modules_and_their_parameters(mesh):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to("jax")
    xs.mark_sharding(model[0].weight, mesh.get_xs_mesh(), ("tp", None))
    comm_mode = CommDebugMode()
    with comm_mode:
        model(torch.ones(2, 8, device="jax")).cpu()
    info = comm_mode.get_sharding_info()
    assert info["Sequential.0.weight"] == (Replicate(), Shard(0))
    assert info["Sequential.2.bias"] == (Replicate(), Replicate())  # the program put it there
    info = comm_mode.get_parameter_info()
    assert list(info) == ["Sequential.0", "Sequential.2"]
    assert info["Sequential.2"]["bias"] is model[2].bias
    table = comm_mode.generate_comm_debug_tracing_table(noise_level=1)
    assert "Sequential.0\n" in table and "*weight: (Replicate(), Shard(dim=0))" in table
    assert "Sequential" not in comm_mode.generate_comm_debug_tracing_table(noise_level=0)


def test_modules_on_no_mesh():
    linear = nn.Linear(4, 4).to("jax")
    comm_mode = CommDebugMode()
    with comm_mode:
        linear(torch.ones(2, 4, device="jax")).cpu()
    assert comm_mode.get_sharding_info() == {}
    assert "*bias: not laid out" in comm_mode.generate_comm_debug_tracing_table()


def test_tables_and_files(mesh, tmp_path):
    a, b = product(mesh)
    comm_mode = CommDebugMode()
    with comm_mode:
        kept = a @ b
    assert kept.shape == (8, 4)
    table = comm_mode.generate_comm_debug_tracing_table()
    assert table.splitlines() == [
        "Global",
        "  *all_reduce: 1  64 B",
        f"  program 0, run at {comm_mode.runs[0].where}",
        "    *all_reduce: 1  64 B",
        "      **all_reduce along tp: 64 B",
    ]
    assert comm_mode.runs[0].where.startswith("test_debug.py:")
    comm_mode.log_comm_debug_tracing_table_to_file(tmp_path / "log.txt")
    assert (tmp_path / "log.txt").read_text() == table
    comm_mode.generate_json_dump(tmp_path / "log.json")
    dump = json.loads((tmp_path / "log.json").read_text())
    assert dump["counts"] == {"all_reduce": 1}
    assert dump["programs"][0]["collectives"] == [
        {"kind": "all_reduce", "bytes": 64, "times": 1, "axes": ["tp"]}
    ]


def test_a_program_without_a_mesh_has_none():
    comm_mode = CommDebugMode()
    with comm_mode:
        kept = torch.ones(4, device="jax") + 1
    assert comm_mode.get_total_counts() == 0 and kept.shape == (4,)
    assert "no collectives" in comm_mode.generate_comm_debug_tracing_table()


def test_moves_outside_programs_are_named(mesh):
    x = distribute_tensor(torch.ones(8, 8), mesh, [Shard(0), Shard(1)])
    xs.sync()
    comm_mode = CommDebugMode()
    with comm_mode:
        xs.clear_sharding(x)
        xs.sync()
    assert "moved between devices outside programs: 1" in (
        comm_mode.generate_comm_debug_tracing_table()
    )


def test_axes_can_be_those_of_another_mesh(mesh):
    a, b = product(mesh)
    comm_mode = CommDebugMode(init_device_mesh("jax", (4, 2), mesh_dim_names=("u", "v")))
    with comm_mode:
        kept = a @ b
    assert kept.shape == (8, 4)
    assert comm_mode.get_axis_counts() == {("all_reduce", None): 1}  # 4 in a row: across (u, v)
    comm_mode = CommDebugMode(init_device_mesh("jax", (2, 2, 2), mesh_dim_names=("u", "v", "w")))
    with comm_mode:
        kept = a @ b
    assert comm_mode.get_axis_counts() == {("all_reduce", ("v", "w")): 1}


def text_of(function, *args):
    return jax.jit(function).lower(*args).compile().as_text()


def per_device(mesh, function, out_specs):
    return jax.shard_map(
        function, mesh=mesh, in_specs=P("tp"), out_specs=out_specs, check_vma=False
    )


@pytest.mark.parametrize(
    ("function", "out_specs", "kind"),
    [
        (lambda x: jax.lax.psum(x, "tp"), P(), "all_reduce"),
        (lambda x: jax.lax.all_gather(x, "tp", tiled=True), P(), "all_gather"),
        (lambda x: jax.lax.psum_scatter(x, "tp", tiled=True), P("tp"), "reduce_scatter"),
        (lambda x: jax.lax.all_to_all(x, "tp", 0, 1, tiled=True), P("tp"), "all_to_all"),
        (
            lambda x: jax.lax.ppermute(x, "tp", [(i, (i + 1) % 4) for i in range(4)]),
            P("tp"),
            "collective_permute",
        ),
    ],
)
def test_each_kind_and_the_axis_it_goes_along(mesh, function, out_specs, kind):
    jax_mesh = mesh.get_jax_mesh()
    program = text_of(per_device(jax_mesh, function, out_specs), jnp.zeros((64, 16)))
    (found,) = collectives(program)
    assert (found.kind, found.times) == (kind, 1)
    assert axes_of(found, jax_mesh) == ("tp",)
    # The counter of the benchmarks, written apart, reads the same bytes.
    ((_, size),) = counted.find(program)
    assert found.bytes == size


def test_loops_count_their_turns(mesh):
    jax_mesh = mesh.get_jax_mesh()

    def function(x):
        def inner(carry, _):
            return jax.lax.psum(carry, "tp") / 4, None

        def outer(carry, _):
            return jax.lax.scan(inner, carry, None, length=3)[0], None

        return jax.lax.scan(outer, x, None, length=5)[0]

    program = text_of(per_device(jax_mesh, function, P("tp")), jnp.zeros((64, 16)))
    assert sum(found.times for found in collectives(program)) == 15


def test_branches_count_the_one_with_most(mesh):
    jax_mesh = mesh.get_jax_mesh()

    def function(x):
        return jax.lax.cond(
            x.sum() > 0, lambda v: jax.lax.psum(jax.lax.pmax(v, "tp") * 2, "tp"), lambda v: v, x
        )

    program = text_of(per_device(jax_mesh, function, P("tp")), jnp.zeros((64, 16)))
    assert sum(found.times for found in collectives(program)) == 2


def entry(line):
    return f"ENTRY %main (p: f32[8]) -> f32[8] {{\n  {line}\n}}"


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", ("tp",)),
        ("replica_groups=[2,4]<=[8]", ("tp",)),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", ("dp",)),
        ("replica_groups={}", ("dp", "tp")),
        ("replica_groups={{0,1,2,3,4,5,6,7}}", ("dp", "tp")),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}", ("dp",)),
        ("replica_groups=mesh['a'=2,'b'=4,'c'=1] {'b'}", ("tp",)),
        ("replica_groups=mesh['a'=1,'b'=4,'c'=2], device_ids=([2,4]T(1,0)) {'b'}", ("tp",)),
        ("replica_groups=mesh['a'=8] {'a':(1)2}", ("dp",)),
        ("replica_groups=mesh['a'=8] {'a':(2)4}", ("tp",)),
        ("replica_groups=mesh['a'=8] {'a':(2)2}", None),
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", None),
        ("source_target_pairs={{0,4},{1,5}}", None),
        ("channel_id=3", None),
    ],
)
def test_ways_to_write_groups(mesh, groups, axes):
    (found,) = collectives(entry(f"%a = f32[2]{{0}} all-reduce(%p), {groups}, to_apply=%add"))
    expected = None if axes is None and "source" in groups else axes
    got = axes_of(found, mesh.get_jax_mesh())
    assert got == (("dp",) if "source" in groups else expected)


def test_groups_by_mesh_are_those_of_jax(mesh):
    """XLA's shortest form against the devices that really exchange."""
    jax_mesh = mesh.get_jax_mesh()
    x = jax.device_put(jnp.zeros((8, 8)), jax.NamedSharding(jax_mesh, P("tp", "dp")))
    program = text_of(lambda v: (v + 1).sum(0), x)
    reduced = [found for found in collectives(program) if found.kind == "all_reduce"]
    assert [axes_of(found, jax_mesh) for found in reduced] == [("tp",)]


def test_devices_outside_the_mesh_are_no_axis():
    small = iso.make_mesh((2,), ("x",))
    assert axes_of(Collective("all_reduce", 8, ((0, 7),), 1), small) is None


def test_visualize(mesh, capsys):
    visualize_sharding(product(mesh)[1], header="b")
    shown = capsys.readouterr().out
    assert shown.startswith("b\nfloat32[16, 4]  P('tp',)  mesh (dp=2, tp=4)")
    assert shown == f"b\n{iso.visualize(product(mesh)[1], use_rich=False)}\n"
