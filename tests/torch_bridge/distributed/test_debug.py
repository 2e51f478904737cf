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


def product(mesh):
    """Operands of a product that is summed over tp."""
    a = distribute_tensor(torch.ones(8, 16), mesh, [Shard(0), Shard(1)])
    b = distribute_tensor(torch.ones(16, 4), mesh, [Replicate(), Shard(0)])
    return a, b


def test_counts_under_torchs_names(mesh):
    a, b = product(mesh)
    outside = CommDebugMode()
    before = a @ b
    comm_mode = CommDebugMode()
    with outside:
        pass
    with comm_mode:
        total = a @ b
    after = a @ b
    xs.sync()
    assert outside.get_total_counts() == 0 and comm_mode.get_total_counts() == 1
    assert before.shape == total.shape == after.shape == (8, 4)
    assert comm_mode.comm_counts == comm_mode.get_comm_counts() == {"all_reduce": 1}
    assert comm_mode.comm_counts[funcol.all_reduce] == 1
    assert comm_mode.comm_counts[funcol.all_gather_into_tensor] == 0
    whole = comm_mode.comm_module_counts["Global"]
    assert whole["forward"][funcol.all_reduce] == 1 and whole["backward"][funcol.all_reduce] == 0


def test_each_run_counts(mesh):
    a, b = product(mesh)
    step = xs.compile(torch.mm)
    step(a, b)
    comm_mode = CommDebugMode()
    for _ in range(2):  # it starts from zero each time
        with comm_mode:
            for _ in range(3):
                step(a, b)
        assert comm_mode.get_comm_counts() == {"all_reduce": 3}
        assert comm_mode.get_comm_bytes() == {"all_reduce": 3 * 4 * 4 * 4}
        assert comm_mode.get_axis_counts() == {("all_reduce", ("tp",)): 3}
        assert comm_mode.get_total_counts() == 3 and len(comm_mode.runs) == 3
        assert repr(comm_mode) == "CommDebugMode(get_total_counts()=3)"


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


def test_without_a_mesh_there_are_none():
    linear = nn.Linear(4, 4).to("jax")
    comm_mode = CommDebugMode()
    with comm_mode:
        linear(torch.ones(2, 4, device="jax")).cpu()
    assert comm_mode.get_total_counts() == 0 and comm_mode.get_sharding_info() == {}
    table = comm_mode.generate_comm_debug_tracing_table()
    assert "no collectives" in table and "*bias: not sharded" in table


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
    for shape, names, axes in (
        ((4, 2), ("u", "v"), None),  # 4 in a row: across (u, v)
        ((2, 2, 2), ("u", "v", "w"), ("v", "w")),
    ):
        comm_mode = CommDebugMode(init_device_mesh("jax", shape, mesh_dim_names=names))
        with comm_mode:
            kept = a @ b
        assert kept.shape == (8, 4)
        assert comm_mode.get_axis_counts() == {("all_reduce", axes): 1}


def text_of(function, *args):
    return jax.jit(function).lower(*args).compile().as_text()


KINDS = {
    "all_reduce": (lambda x: jax.lax.psum(x, "tp"), P()),
    "all_gather": (lambda x: jax.lax.all_gather(x, "tp", tiled=True), P()),
    "reduce_scatter": (lambda x: jax.lax.psum_scatter(x, "tp", tiled=True), P("tp")),
    "all_to_all": (lambda x: jax.lax.all_to_all(x, "tp", 0, 1, tiled=True), P("tp")),
    "collective_permute": (
        lambda x: jax.lax.ppermute(x, "tp", [(i, (i + 1) % 4) for i in range(4)]),
        P("tp"),
    ),
}


def compiled(mesh, function, out_specs):
    """The program of a function of each device's values."""
    options = {"in_specs": P("tp"), "out_specs": out_specs, "check_vma": False}
    return text_of(jax.shard_map(function, mesh=mesh, **options), jnp.zeros((64, 16)))


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_and_the_axis_it_goes_along(mesh, kind):
    program = compiled(mesh.get_jax_mesh(), *KINDS[kind])
    (found,) = collectives(program)
    assert (found.kind, found.times) == (kind, 1)
    assert axes_of(found, mesh.get_jax_mesh()) == ("tp",)
    # The counter of the benchmarks, written apart, reads the same bytes.
    ((_, size),) = counted.find(program)
    assert found.bytes == size


def test_loops_count_their_turns_and_branches_the_one_with_most(mesh):
    def loops(x):
        def inner(carry, _):
            return jax.lax.psum(carry, "tp") / 4, None

        def outer(carry, _):
            return jax.lax.scan(inner, carry, None, length=3)[0], None

        return jax.lax.scan(outer, x, None, length=5)[0]

    def branches(x):
        return jax.lax.cond(
            x.sum() > 0, lambda v: jax.lax.psum(jax.lax.pmax(v, "tp") * 2, "tp"), lambda v: v, x
        )

    for function, times in ((loops, 15), (branches, 2)):
        program = compiled(mesh.get_jax_mesh(), function, P("tp"))
        assert sum(found.times for found in collectives(program)) == times


GROUPS = {
    "replica_groups={{0,1,2,3},{4,5,6,7}}": ("tp",),
    "replica_groups=[2,4]<=[8]": ("tp",),
    "replica_groups=[4,2]<=[2,4]T(1,0)": ("dp",),
    "replica_groups={}": ("dp", "tp"),
    "replica_groups={{0,1,2,3,4,5,6,7}}": ("dp", "tp"),
    "replica_groups=mesh['a'=2,'b'=4] {'a'}": ("dp",),
    "replica_groups=mesh['a'=2,'b'=4,'c'=1] {'b'}": ("tp",),
    "replica_groups=mesh['a'=1,'b'=4,'c'=2], device_ids=([2,4]T(1,0)) {'b'}": ("tp",),
    "replica_groups=mesh['a'=8] {'a':(1)2}": ("dp",),
    "replica_groups=mesh['a'=8] {'a':(2)4}": ("tp",),
    "replica_groups=mesh['a'=8] {'a':(2)2}": None,
    "replica_groups={{0,1},{2,3},{4,5},{6,7}}": None,
    "source_target_pairs={{0,4},{1,5}}": ("dp",),
    "channel_id=3": None,
}


def test_ways_to_write_groups(mesh):
    for groups, axes in GROUPS.items():
        line = f"%a = f32[2]{{0}} all-reduce(%p), {groups}, to_apply=%add"
        (found,) = collectives(f"ENTRY %main (p: f32[8]) -> f32[8] {{\n  {line}\n}}")
        assert axes_of(found, mesh.get_jax_mesh()) == axes, groups


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
