"""Products that libtpu takes apart: which, and what they become."""

from __future__ import annotations

import collections

import pytest

from isoshard.core.runtime.hlo_text import parsed
from isoshard.planner.machine.topologies import topology
from isoshard.planner.programs.device_ops import device_ops
from isoshard.planner.programs.windowed_products import rewrite_windowed, windowed_products
from tests.planner.programs.test_recorded_programs import read, total

LINE = 'metadata={op_name="a.py:1 (f)/dot"}'
GATHERED = """
HloModule step
ENTRY %main (x: bf16[ROWS,1024], w: bf16[PART,1024]) -> bf16[ROWS,1024] {
  %x = bf16[ROWS,1024]{1,0} parameter(0)
  %w = bf16[PART,1024]{1,0} parameter(1)
  %g = bf16[1024,1024]{1,0} all-gather(%w), GROUPS, dimensions={0}
  %c = bf16[1024,1024]{0,1} copy(%g)
  ROOT %d = bf16[ROWS,1024]{1,0} dot(%x, %c), DIMS, LINE
}"""
SUMMED = """
HloModule step
%add (a: bf16[], b: bf16[]) -> bf16[] {
  %a = bf16[] parameter(0)
  %b = bf16[] parameter(1)
  ROOT %s = bf16[] add(%a, %b)
}
ENTRY %main (x: bf16[ROWS,1024], y: bf16[ROWS,1024]) -> (bf16[PART,1024], bf16[PART,1024]) {
  %x = bf16[ROWS,1024]{1,0} parameter(0)
  %y = bf16[ROWS,1024]{1,0} parameter(1)
  %id = u32[] partition-id()
  %zero = u32[] constant(0)
  %d = bf16[1024,1024]{1,0} dot(%x, %y), lhs_contracting_dims={0}, rhs_contracting_dims={0}, LINE
  %r = bf16[1024,1024]{1,0} all-reduce(%d), GROUPS, to_apply=%add
  %k = bf16[PART,1024]{1,0} dynamic-slice(%r, %id, %zero), dynamic_slice_sizes={PART,1024}
  %e = bf16[1024,1024]{1,0} dot(%y, %x), lhs_contracting_dims={0}, rhs_contracting_dims={0}, LINE
  %q = bf16[1024,1024]{1,0} all-reduce(%e), GROUPS, to_apply=%add
  %l = bf16[PART,1024]{1,0} dynamic-slice(%q, %id, %zero), dynamic_slice_sizes={PART,1024}
  ROOT %all = (bf16[PART,1024]{1,0}, bf16[PART,1024]{1,0}) tuple(%k, %l)
}"""
SHAPES = {4: "v5e:2x2", 8: "v5e:2x4", 16: "v5e:4x4", 64: "v5e:8x8"}
ALL = [("data",), ("data",)]


def made(text, count=8, rows=4096, inner=True):
    values = {
        "GROUPS": f"replica_groups=[1,{count}]<=[{count}]",
        "DIMS": f"lhs_contracting_dims={{1}}, rhs_contracting_dims={{{0 if inner else 1}}}",
        "ROWS": rows,
        "PART": 1024 // count,
        "LINE": LINE,
    }
    for name, value in values.items():
        text = text.replace(name, str(value))
    return parsed(text)


def line_of(count):
    return topology(SHAPES[count]).mesh((count,), ("data",))


def found(module, mesh, given=ALL, chip="v5e", **more):
    products = windowed_products(module, mesh, given, chip, **more)
    return [one for several in products.values() for one in several]


def sent(module, mesh, given=ALL):
    products = windowed_products(module, mesh, given, "v5e")
    ops = device_ops(rewrite_windowed(module, products), mesh, {}, target="tpu", joining=False)
    assert all(op.line == "a.py:1 (f)" for op in ops if op.is_collective)
    counts = collections.Counter()
    for op in ops:
        if op.is_collective:
            counts[op.name, op.sent] += op.times
    return dict(counts)


def test_a_gather_that_only_a_product_reads():
    (one,) = found(made(GATHERED), line_of(8))
    assert (one.dot.name, one.sends.name, one.between) == ("d", "g", ("c",))
    assert (one.factor, one.inner, one.count) == (1, True, 8)


@pytest.mark.parametrize(("rows", "pays"), [(512, False), (544, True)])
def test_it_has_to_pay(rows, pays):
    """libtpu takes the product apart with 544 rows a device, and not with 512."""
    assert bool(found(made(GATHERED, rows=rows), line_of(8))) == pays


@pytest.mark.parametrize(("count", "expected"), [(4, True), (8, True), (16, True), (64, False)])
def test_it_needs_a_number_of_devices(count, expected):
    assert bool(found(made(GATHERED, count), line_of(count))) == expected


LEFT = {
    "read by two products": "  ROOT %e = bf16[ROWS,1024]{1,0} dot(%d, %c), "
    "lhs_contracting_dims={1}, rhs_contracting_dims={1}, LINE",
    "summed afterwards": "  ROOT %r = bf16[ROWS,1024]{1,0} all-reduce(%d), GROUPS",
}


@pytest.mark.parametrize("why", LEFT)
def test_what_is_left_as_it_is(why):
    text = GATHERED.replace("ROOT %d", "%d").replace("LINE\n}", f"LINE\n{LEFT[why]}\n}}")
    assert not found(made(text), line_of(8))
    for more in ({"chip": "h100"}, {"scaled": "data"}):
        assert not found(made(GATHERED), line_of(8), **more)
    slices = topology("v5e:2*2x2").mesh((8,), ("data",))  # libtpu counts with 6e9 bytes a second
    assert not found(made(GATHERED, rows=8192), slices) and found(made(GATHERED, rows=8704), slices)


def test_the_result_must_be_split_along_all_axes():
    mesh = topology("v5e:2x4").mesh((2, 4), ("model", "data"))
    groups = "replica_groups=[2,4]<=[8]"
    module = made(GATHERED.replace("GROUPS", groups).replace("PART", "256"))
    assert found(module, mesh, [("data",), ("data", "model")])
    assert not found(module, mesh, [("data",), ("data",)])
    assert not found(module, mesh, [(), ("data", "model")])


def test_a_sum_of_which_each_device_keeps_a_slice():
    first, second = found(made(SUMMED), line_of(8))
    assert (first.dot.name, first.sends.name, first.factor) == ("d", "r", None)
    assert (second.dot.name, second.sends.name) == ("e", "q")
    whole = SUMMED.replace("dynamic-slice(%r, ", "slice(%r, ")
    assert [one.dot.name for one in found(made(whole), line_of(8))] == ["e"]


@pytest.mark.parametrize(("count", "times", "inner"), [(4, 3, True), (8, 9, False), (16, 17, True)])
def test_what_a_gather_becomes(count, times, inner):
    module, mesh = made(GATHERED, count, inner=inner), line_of(count)
    assert sent(module, mesh) == {("collective-permute", 2**21 // count): times}
    assert_computes_the_same(module, mesh)


def assert_computes_the_same(module, mesh):
    products = windowed_products(module, mesh, ALL, "v5e")
    changed = device_ops(rewrite_windowed(module, products), mesh, {}, target="tpu")
    assert total(changed).flops == total(device_ops(module, mesh, {}, target="tpu")).flops


@pytest.mark.parametrize(("count", "times"), [(4, 8), (8, 18), (16, 34)])
def test_what_sums_become(count, times):
    """With four devices the two start from the same zeros, which are sent once each way."""
    module, mesh = made(SUMMED, count), line_of(count)
    assert sent(module, mesh) == {("collective-permute", 2**21 // count): times}
    assert_computes_the_same(module, mesh)


COMPILED = {
    (4, 4): {
        ("all-gather", "data"): (6, 6 * 2**20),
        ("all-reduce", "data"): (1, 4),
        ("all-reduce", "model"): (6, 6 * 2**24),
        ("collective-permute", "data"): (48, 48 * 2**18),
    },
    (16, 1): {("all-reduce", "data"): (1, 4), ("collective-permute", "data"): (306, 306 * 2**18)},
}
"""Of `sample_steps.layers` (three layers, 1024 x 2048, 8192 rows a device) as libtpu 0.0.52 made it
for these meshes of v5e: operations and bytes, counted by `benchmarks/counted_collectives.py`."""


@pytest.mark.parametrize("shape", COMPILED)
def test_a_step_sends_what_libtpus_program_sends(shape):
    mesh = topology("v5e:4x4").mesh(shape, ("data", "model"))
    module = read("host_{}x{}".format(*shape))
    given = [("data", "model"), ("data", "model"), ("data",)]
    products = windowed_products(module, mesh, given, "v5e")
    found = collections.defaultdict(lambda: (0, 0))
    for op in device_ops(rewrite_windowed(module, products), mesh, {}, target="tpu"):
        if op.is_collective:
            times, size = found[op.name, *op.axes]
            found[op.name, *op.axes] = times + op.times, size + op.times * op.sent
    assert found == COMPILED[shape]
