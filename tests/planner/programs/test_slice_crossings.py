"""What goes from slice to slice, in programs for 2 and 32 slices, and what a plan lets go."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from isoshard import P, Plan, PlanError, hybrid_mesh, make_mesh, shard
from isoshard.core.layout.axis_types import auto
from isoshard.core.runtime.hlo_text import parsed
from isoshard.planner.estimating import estimate
from isoshard.planner.machine.topologies import topology
from isoshard.planner.programs.device_ops import device_ops
from isoshard.planner.programs.slice_crossings import check_crossings, crossings
from isoshard.planner.reports.report import Report
from tests.planner.programs import sliced_steps
from tests.planner.programs.sliced_steps import HSDP, PARAMETER_BYTES, arguments, mesh_of

SCALARS = 512
"""Bytes below which a crossing is the loss: a TPU sends a scalar as a row of 128."""


def gradients(found):
    return [one for one in found if one.bytes > SCALARS]


@pytest.mark.parametrize("slices", [2, 32])
def test_libtpu_sends_gradients_over_dcn_split_by_the_devices_of_a_slice(slices):
    mesh = mesh_of(slices)
    found = check_crossings(sliced_steps.recorded(slices), mesh, HSDP)
    assert {(one.kind, one.axes, one.slices) for one in found} == {
        ("all-reduce", ("replica",), slices)
    }
    inside = mesh.shape["data"]
    assert sum(one.bytes * one.count for one in gradients(found)) == PARAMETER_BYTES // inside
    assert all("sliced_steps.py" in one.line for one in found)


def test_planned_without_a_compiler_it_is_the_same():
    slices = 32
    mesh = mesh_of(slices)
    report = estimate(sliced_steps.step, arguments(), mesh, HSDP, depth="trace")
    found = check_crossings(report, mesh, HSDP)
    assert {(one.kind, one.slices) for one in found} == {("all-reduce", slices)}
    assert {one.axes for one in gradients(found)} == {("replica",)}
    inside = mesh.shape["data"]
    assert sum(one.bytes * one.count for one in gradients(found)) == PARAMETER_BYTES // inside
    assert Report.from_json(report.to_json()) == report
    assert f"replica, {slices} slices" in report.to_html()


def test_without_fsdp_in_the_slice_all_parameters_go_over_dcn():
    mesh = mesh_of(2)
    plan = Plan({"*": None}, inputs=P(("replica", "data")), dcn={"replica": "all-reduce"})
    report = estimate(sliced_steps.step, arguments(), mesh, plan)
    sent = sum(one.bytes * one.count for one in gradients(check_crossings(report, mesh, plan)))
    assert sent == PARAMETER_BYTES


def test_parameters_split_over_slices_are_an_error_that_names_axis_line_bytes_and_fix():
    mesh = mesh_of(2)
    plan = Plan({"*": P("replica")}, inputs=P(("replica", "data")), dcn={"replica": "all-reduce"})
    report = estimate(sliced_steps.step, arguments(), mesh, plan)
    with pytest.raises(PlanError) as caught:
        check_crossings(report, mesh, plan)
    said = str(caught.value)
    assert "along 'replica' (2 slices), that the plan does not allow" in said
    assert "(it allows 'replica': all-reduce)" in said
    assert "all-gather over replica, 2 slices: " in said
    assert "4.0 MiB a device, sliced_steps.py:" in said
    assert "Plan(dcn={'replica': ('all-reduce', " in said


def test_programs_of_one_slice_number_its_devices_in_the_order_of_the_mesh():
    text = """
HloModule step, num_partitions=4
ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %a = f32[8]{0} all-reduce(%x), replica_groups={{0,2},{1,3}}, to_apply=%add
  %b = f32[8]{0} all-reduce(%a), replica_groups={{0,1},{2,3}}, to_apply=%add
  ROOT %c = f32[8]{0} all-reduce(%b), replica_groups={}, to_apply=%add
}"""
    machine = topology("v5e:4*2x2")
    grid = np.array(machine.devices, object).reshape(4, 2, 2).transpose(1, 0, 2).reshape(2, 8)
    mesh = jax.sharding.Mesh(grid, ("x", "data"))
    ops = device_ops(parsed(text), mesh, {})
    assert [(one.axes, one.slices) for one in ops] == [
        (("x",), 1),
        (("data",), 1),
        (("x", "data"), 1),
    ]
    assert crossings(text, mesh) == ()


def test_transfers_between_some_slices_name_the_axes_of_the_mesh():
    text = """
HloModule step, num_partitions=4
ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %after = token[] after-all()
  %a = (f32[8]{0}, u32[], token[]) send(%x, %after), is_host_transfer=true, frontend_attributes={\
_xla_megascale_target={{100000,300000},{200000,400000}},_xla_megascale_transfer_type="ALL_GATHER"}
  %b = (f32[8]{0}, u32[], token[]) send(%x, %after), is_host_transfer=true, frontend_attributes={\
_xla_megascale_target={{100000,200000},{300000,400000}},_xla_megascale_transfer_type="ALL_REDUCE"}
  %c = (f32[8]{0}, u32[], token[]) send(%x, %after), is_host_transfer=true, frontend_attributes={\
_xla_megascale_target="{1,2,3,4}x{0:3}",_xla_megascale_transfer_type="REDUCE_SCATTER"}
  ROOT %r = f32[8]{0} add(%x, %x)
}"""
    mesh = topology("v5e:4*2x2").mesh((2, 2, 4), ("a", "b", "data"), slices={"a": 2, "b": 2})
    found = {(one.kind, one.axes, one.slices, one.bytes) for one in crossings(text, mesh)}
    assert found == {
        ("all-gather", ("a",), 2, 64),
        ("all-reduce", ("b",), 2, 32),
        ("reduce-scatter", ("a", "b"), 4, 32),
    }


def test_a_part_of_an_axis_that_stays_in_a_slice_does_not_cross():
    mesh = auto(hybrid_mesh((4,), (2,), ("x",)))
    split = jax.sharding.Mesh(mesh.devices.reshape(2, 4), ("slice", "inside"))

    def summed(x):
        return jax.lax.psum(x, "inside")

    x = shard(jnp.arange(8.0), mesh, P("x"))
    run = jax.shard_map(summed, mesh=split, in_specs=P(("slice", "inside")), out_specs=P("slice"))
    program = jax.jit(run).lower(x).compile()
    assert "all-reduce" in program.as_text()
    assert crossings(program, mesh, slices=2) == ()
    (found,) = crossings(program, mesh, slices=4)
    assert (found.axes, found.slices) == (("x",), 2)


def test_what_is_no_program():
    with pytest.raises(TypeError, match=r"program must be .* not Plan"):
        crossings(Plan(), make_mesh((8,), ("x",)))


def test_what_is_no_rule_for_slices():
    for dcn in ({"x": "allreduce"}, {"x": ()}, {1: "all-reduce"}, "all", {"x": 3}):
        with pytest.raises(PlanError, match=r"dcn= takes mesh axes and the kinds of collectives"):
            Plan(dcn=dcn)


def test_rules_of_factors_and_of_plans_put_before_are_joined():
    one, two = Plan(dcn={"a": "all-reduce"}), Plan(dcn={"a": "all-gather", "b": "all-reduce"})
    both = {"a": ("all-reduce", "all-gather"), "b": ("all-reduce",)}
    assert (one * two).over_dcn() == one.otherwise(two).over_dcn() == both
    assert eval(repr(one)) == one
    assert hash(one) != hash(two)
