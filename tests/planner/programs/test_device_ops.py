"""Collectives, products and loops of compiled programs: of this host, a GPU and a TPU."""

from __future__ import annotations

import collections

import jax
import jax.numpy as jnp
import pytest

from isoshard import P, Plan
from isoshard.core.runtime.hlo_text import parsed
from isoshard.planner.estimating import device_program
from isoshard.planner.machine.topologies import topology
from isoshard.planner.programs.device_ops import device_ops
from isoshard.planner.programs.hlo_costs import costs_of
from isoshard.planner.traced.of_step import traced_step
from tests.planner.programs.test_recorded_programs import read, total

MESH = topology("v5e:2x2").mesh((2, 2), ("data", "model"))
ONE = 1024 * 1024 * 2
"""Bytes of one device's gathered weight; of its activations four times as many."""

SENT = {
    ("all-gather", ("data",), "bfloat16"): 4 * 3 * ONE,
    ("all-reduce", ("model",), "bfloat16"): 2 * 3 * 4 * ONE,
    ("reduce-scatter", ("data",), "bfloat16"): 2 * 3 * ONE,
    ("all-reduce", ("data",), "float32"): 4,
}
"""Of three layers: both weights gathered forward and backward, activations reduced once each way,
both gradients reduced and scattered, the loss."""


def ops_of(name):
    return device_ops(read(name), MESH, {}, target="tpu" if name == "host" else "")


@pytest.mark.parametrize("name", ["host", "h100", "v5e"])
def test_three_compilers_send_and_compute_the_same(name):
    """Products are dots of this host, of a GPU's fusions, or convolutions of a TPU."""
    ops, found = ops_of(name), collections.Counter()
    sends = [op for op in ops if op.is_collective]
    for op in sends:
        found[op.name, op.axes, op.dtype] += op.sent * op.times
    assert found == SENT
    assert all(op.line.startswith("sample_steps.py:") for op in sends)
    products = 2 * 3 * 3  # two in a layer, forward and twice backward, in three layers
    assert total(ops).flops == products * 2 * 1024 * 1024 * 4096
    inside = [op for op in sends if op.dtype == "bfloat16"]
    assert {op.times for op in inside} == {3}
    assert len({op.scope for op in inside}) == 2 and 0 not in {op.scope for op in inside}
    assert {op.waits for op in inside if op.name == "all-gather"} == {False}
    assert {op.waits for op in inside if op.name != "all-gather"} == {True}


LOOP = """
HloModule loop

%body (c: (s32[], f32[8], s32[])) -> (s32[], f32[8], s32[]) {
  %c = (s32[], f32[8]{0}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %two = s32[] constant(2)
  %next = s32[] add(%i, %two)
  %x = f32[8]{0} get-tuple-element(%c), index=1
  %r = f32[8]{0} all-reduce(%x), replica_groups={{0,1},{2,3}}, to_apply=%add
  %n = s32[] get-tuple-element(%c), index=2
  ROOT %t = (s32[], f32[8]{0}, s32[]) tuple(%next, %r, %n)
}

%cond (c: (s32[], f32[8], s32[])) -> pred[] {
  %c = (s32[], f32[8]{0}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %n = s32[] get-tuple-element(%c), index=2
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %start = s32[] constant(1)
  %copied = s32[] copy(%start)
  %limit = s32[] constant(10)
  %t = (s32[], f32[8]{0}, s32[]) tuple(%copied, %p, %limit)
  %w = (s32[], f32[8]{0}, s32[]) while(%t), condition=%cond, body=%body
  ROOT %x = f32[8]{0} get-tuple-element(%w), index=1
}
"""


def test_a_loop_that_says_nothing_is_counted():
    (one,) = [op for op in device_ops(parsed(LOOP), MESH, {}) if op.is_collective]
    assert (one.times, one.axes, one.sent) == (5, ("model",), 32)  # 1, 3, 5, 7, 9
    assert one.waits  # for what the run before made of it
    kept = LOOP.replace("tuple(%next, %r, %n)", "tuple(%next, %x, %n)")
    assert not next(op for op in device_ops(parsed(kept), MESH, {}) if op.is_collective).waits


def test_a_loop_of_unknown_length_counts_once():
    text = LOOP.replace("%limit = s32[] constant(10)", "%limit = s32[] custom-call()")
    (one,) = [op for op in device_ops(parsed(text), MESH, {}) if op.is_collective]
    assert one.times == 1


SUMS = """
HloModule sums

%fused (a: f32[8], b: f32[8], c: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %b = f32[8]{0} parameter(1)
  %c = f32[8]{0} parameter(2)
  %s = f32[8]{0} add(%a, %b)
  ROOT %t = f32[8]{0} multiply(%s, %c)
}

ENTRY %main (p: f32[8], q: f32[8], r: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %q = f32[8]{0} parameter(1)
  %r = f32[8]{0} parameter(2)
  %x = f32[8]{0} all-reduce(%p), replica_groups={{0,1},{2,3}}, to_apply=%add
  %y = f32[8]{0} all-reduce(%q), replica_groups={{0,1},{2,3}}, to_apply=%add
  %z = f32[8]{0} all-reduce(%r), replica_groups={{0,1},{2,3}}, to_apply=%add
  ROOT %f = f32[8]{0} fusion(%x, %y, %z), kind=kLoop, calls=%fused
}
"""


def test_reductions_that_are_added_become_one():

    def count(text):
        ops = device_ops(parsed(text), MESH, {}, target="gpu", joining=False)
        return sum(op.is_collective for op in ops)

    assert count(SUMS) == 2  # of x + y, and z
    assert count(SUMS.replace("%q), replica_groups={{0,1},{2,3}}", "%q), replica_groups={}")) == 3
    meshes = SUMS.replace("{{0,1},{2,3}}", "mesh['a'=2,'b'=2] {'b'}")
    assert count(meshes) == 2
    others = "%q), replica_groups=mesh['a'=2,'b'=2] {'a'}"
    assert count(meshes.replace("%q), replica_groups=mesh['a'=2,'b'=2] {'b'}", others)) == 3


WIDENED = """
HloModule m, is_scheduled=true

%widened (a: bf16[4,8]) -> f32[4,8] {
  %a = bf16[4,8]{1,0} parameter(0)
  %twice = bf16[4,8]{1,0} add(%a, %a)
  ROOT %w = f32[4,8]{1,0} convert(%twice)
}

ENTRY %main (p: bf16[4,8]) -> f32[16,8] {
  %p = bf16[4,8]{1,0} parameter(0)
  %f = f32[4,8]{1,0} fusion(%p), kind=kLoop, calls=%widened
  ROOT %g = f32[16,8]{1,0} all-gather(%f), replica_groups={{0,1,2,3}}, dimensions={0}
}
"""


@pytest.mark.parametrize(
    ("target", "old", "new", "sent"),
    [
        ("gpu", "", "", ("bfloat16", 16 * 8 * 2)),
        ("tpu", "", "", ("float32", 16 * 8 * 4)),
        ("", "", "", ("float32", 16 * 8 * 4)),
        ("gpu", "convert(%twice)", "sine(%twice)", ("float32", 16 * 8 * 4)),
        ("gpu", "  ROOT %g", "  %n = f32[4,8]{1,0} negate(%f)\n  ROOT %g", ("float32", 512)),
    ],
    ids=["gpu", "tpu", "host", "computed wide", "read wide as well"],
)
def test_gpus_gather_what_is_widened_before_it_is(target, old, new, sent):
    text = WIDENED.replace(old, new) if old else WIDENED
    ops = device_ops(parsed(text), MESH, {}, target=target)
    assert [(op.dtype, op.sent) for op in ops if op.is_collective] == [sent]


@pytest.mark.parametrize(
    ("line", "flops"),
    [
        # 8 images of 16 x 16, 3 channels, a kernel of 3 x 3 to 4: 46 of 48 places a side are there
        (
            "f32[8,16,16,4] convolution(%a, %b), window={size=3x3 pad=1_1x1_1}, "
            "dim_labels=b01f_01io->b01f",
            2 * 8 * 46 * 46 * 3 * 4,
        ),
        (
            "f32[8,14,14,4] convolution(%a, %b), window={size=3x3}, dim_labels=b01f_01io->b01f",
            2 * 8 * 14 * 14 * 9 * 3 * 4,
        ),
    ],
)
def test_a_convolution_counts_what_is_there(line, flops):
    module = parsed(
        "HloModule m\nENTRY %main (a: f32[8,16,16,3], b: f32[3,3,3,4]) -> f32[8] {\n"
        "  %a = f32[8,16,16,3] parameter(0)\n  %b = f32[3,3,3,4] parameter(1)\n"
        f"  ROOT %c = {line}\n}}\n"
    )
    assert costs_of(module, module.entry, module.root).flops == flops


def test_copies_into_another_order_are_told_from_others():
    """As the host's compiler writes an array that was gathered along an inner axis."""
    module = parsed("""
HloModule step
%turned (p: f32[8,64]) -> f32[8,64] {
  %p = f32[8,64]{0,1} parameter(0)
  ROOT %c = f32[8,64]{1,0} copy(%p)
}
%same (q: f32[8,64]) -> f32[8,64] {
  %q = f32[8,64]{1,0} parameter(0)
  ROOT %d = f32[8,64]{1,0} copy(%q)
}
ENTRY %main (a: f32[8,64]) -> f32[64,8] {
  %a = f32[8,64]{0,1} parameter(0)
  %f = f32[8,64]{1,0} fusion(%a), kind=kLoop, calls=%turned
  %g = f32[8,64]{1,0} fusion(%f), kind=kLoop, calls=%same
  %h = f32[8,64]{1,0} negate(%g)
  ROOT %t = f32[64,8]{1,0} transpose(%h), dimensions={1,0}
}""")
    moved = 2 * 8 * 64 * 4
    assert [op.reordered for op in device_ops(module, MESH, {})] == [moved, 0, 0, moved]


@pytest.mark.parametrize(("axis", "depth"), [(0, "trace"), (1, "trace"), (1, "partition")])
def test_gathers_along_an_inner_axis_are_put_in_order(axis, depth):
    mesh = topology("cpu:8").mesh((8,), ("data",))
    spec = P("data", None) if axis == 0 else P(None, "data")
    plan = Plan({"w": spec}, inputs=P("data", None))
    w, x = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((512, 256), (4096, 512)))
    step = traced_step(lambda w, x: jnp.tanh(x @ w["w"]), ({"w": w}, x), {}, mesh, plan)
    ops = device_program(step, depth, progress=False).ops
    assert [op.name for op in ops if op.is_collective] == ["all-gather"]
    assert sum(op.reordered for op in ops) == axis * 2 * 512 * (256 + 32) * 4
