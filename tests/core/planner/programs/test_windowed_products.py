"""Products that libtpu takes apart: which, and what they become."""

from __future__ import annotations

import collections

import pytest

from isoshard.core.planner.machine.topologies import topology
from isoshard.core.planner.programs.device_ops import device_ops, total
from isoshard.core.planner.programs.hlo_text import parsed
from isoshard.core.planner.programs.live_values import liveness
from isoshard.core.planner.programs.windowed_loops import multiplied_by_parts
from isoshard.core.planner.programs.windowed_products import windowed_products
from tests.core.planner.programs.test_hlo_text import read

LINE = 'metadata={op_name="line:a.py:1 (f)/dot"}'
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
    ops = device_ops(multiplied_by_parts(module, products), mesh, {}, target="tpu", joining=False)
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


def test_between_slices_less_pays():
    """libtpu counts with 6e9 bytes a second there: 22.4 ms of 128 MiB."""
    mesh = topology("v5e:2*2x2").mesh((8,), ("data",))
    assert not found(made(GATHERED, rows=8192), mesh)
    assert found(made(GATHERED, rows=8704), mesh)


@pytest.mark.parametrize(("count", "expected"), [(4, True), (8, True), (16, True), (64, False)])
def test_it_needs_a_number_of_devices(count, expected):
    assert bool(found(made(GATHERED, count), line_of(count))) == expected


def test_two_products_of_one_gather_share_it():
    text = GATHERED.replace("ROOT %d", "%d").replace(
        "LINE\n}",
        "LINE\n  ROOT %e = bf16[ROWS,1024]{1,0} dot(%d, %c), lhs_contracting_dims={1}, "
        "rhs_contracting_dims={1}, LINE\n}",
    )
    assert not found(made(text), line_of(8))


def test_the_result_must_be_split_along_all_axes():
    mesh = topology("v5e:2x4").mesh((2, 4), ("model", "data"))
    groups = "replica_groups=[2,4]<=[8]"
    module = made(GATHERED.replace("GROUPS", groups).replace("PART", "256"))
    assert found(module, mesh, [("data",), ("data", "model")])
    assert not found(module, mesh, [("data",), ("data",)])
    assert not found(module, mesh, [(), ("data", "model")])


def test_a_result_that_is_summed_afterwards_is_left():
    text = GATHERED.replace("ROOT %d", "%d").replace(
        "LINE\n}", "LINE\n  ROOT %r = bf16[ROWS,1024]{1,0} all-reduce(%d), GROUPS\n}"
    )
    assert not found(made(text), line_of(8))


@pytest.mark.parametrize("more", [{"chip": "h100"}, {"scaled": "data"}])
def test_other_chips_and_scaled_axes_are_left(more):
    assert not found(made(GATHERED), line_of(8), **more)


def test_a_sum_of_which_each_device_keeps_a_slice():
    first, second = found(made(SUMMED), line_of(8))
    assert (first.dot.name, first.sends.name, first.factor) == ("d", "r", None)
    assert (second.dot.name, second.sends.name) == ("e", "q")
    whole = SUMMED.replace("dynamic-slice(%r, ", "slice(%r, ")
    assert [one.dot.name for one in found(made(whole), line_of(8))] == ["e"]


@pytest.mark.parametrize(("count", "times"), [(4, 3), (8, 9), (16, 17)])
@pytest.mark.parametrize("inner", [True, False])
def test_what_a_gather_becomes(count, times, inner):
    module = made(GATHERED, count, inner=inner)
    assert sent(module, line_of(count)) == {("collective-permute", 2**21 // count): times}


@pytest.mark.parametrize(("count", "times"), [(4, 8), (8, 18), (16, 34)])
def test_what_sums_become(count, times):
    """With four devices the two start from the same zeros, which are sent once each way."""
    module = made(SUMMED, count)
    assert sent(module, line_of(count)) == {("collective-permute", 2**21 // count): times}


@pytest.mark.parametrize("text", [GATHERED, SUMMED])
@pytest.mark.parametrize("count", [4, 8])
def test_what_is_computed_stays(text, count):
    module, mesh = made(text, count), line_of(count)
    products = windowed_products(module, mesh, ALL, "v5e")
    assert products
    changed = device_ops(multiplied_by_parts(module, products), mesh, {}, target="tpu")
    assert total(changed).flops == total(device_ops(module, mesh, {}, target="tpu")).flops


def test_memory_is_that_of_parts_and_of_what_is_added():
    """The sum is the program's result; beside it what is added to it, and three parts."""
    module, mesh = made(GATHERED), line_of(8)
    products = windowed_products(module, mesh, ALL, "v5e")
    assert liveness(module, targets=True).temporary == 2**21
    parts = liveness(multiplied_by_parts(module, products), targets=True)
    assert parts.temporary == 4096 * 1024 * 2 + 3 * 2**21 // 8


def test_permutes_beside_products_do_not_wait():
    module, mesh = made(GATHERED), line_of(8)
    changed = multiplied_by_parts(module, windowed_products(module, mesh, ALL, "v5e"))
    inside = [op for op in device_ops(changed, mesh, {}, target="tpu") if op.axes and op.scope]
    assert len(inside) == 4 and not any(op.waits for op in inside)


COMPILED = {
    (4, 4): {
        ("all-gather", "data"): (6, 6 * 2**20),
        ("all-reduce", "data"): (1, 4),
        ("all-reduce", "model"): (6, 6 * 2**24),
        ("collective-permute", "data"): (48, 48 * 2**18),
    },
    (16, 1): {
        ("all-reduce", "data"): (1, 4),
        ("collective-permute", "data"): (306, 306 * 2**18),
    },
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
    for op in device_ops(multiplied_by_parts(module, products), mesh, {}, target="tpu"):
        if op.is_collective:
            times, size = found[op.name, *op.axes]
            found[op.name, *op.axes] = times + op.times, size + op.times * op.sent
    assert found == COMPILED[shape]
