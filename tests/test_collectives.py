"""The collective counter, on small programs whose collectives are known, and on HLO's odd forms."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import collectives

MESH = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))


def program(function, *args):
    return jax.jit(function).lower(*args).compile().as_text()


def per_device(function, out_specs):
    return partial(jax.shard_map, mesh=MESH, in_specs=P("x"), out_specs=out_specs, check_vma=False)(
        function
    )


@pytest.mark.parametrize(
    ("function", "out_specs", "expected"),
    [
        pytest.param(
            lambda x: jax.lax.psum(x, "x"), P(), {"all-reduce": (1, 8 * 16 * 4)}, id="all-reduce"
        ),
        pytest.param(
            lambda x: jax.lax.all_gather(x, "x", tiled=True),
            P(),
            {"all-gather": (1, 64 * 16 * 4)},
            id="all-gather",
        ),
        pytest.param(
            lambda x: jax.lax.psum_scatter(x, "x", tiled=True),
            P("x"),
            {"reduce-scatter": (1, 16 * 4)},
            id="reduce-scatter",
        ),
        pytest.param(
            lambda x: jax.lax.all_to_all(x, "x", 0, 1, tiled=True),
            P("x"),
            {"all-to-all": (1, 8 * 16 * 4)},
            id="all-to-all",
        ),
        pytest.param(
            lambda x: jax.lax.ppermute(x, "x", [(i, (i + 1) % 8) for i in range(8)]),
            P("x"),
            {"collective-permute": (1, 8 * 16 * 4)},
            id="collective-permute",
        ),
        pytest.param(lambda x: x + 1, P("x"), {}, id="none"),
    ],
)
def test_each_kind_in_a_compiled_program(function, out_specs, expected):
    x = jnp.zeros((64, 16), jnp.float32)
    assert collectives.summarize(program(per_device(function, out_specs), x)) == expected


def test_partitioned_product_reduces_once():
    x = jax.device_put(jnp.zeros((4, 64), jnp.bfloat16), NamedSharding(MESH, P(None, "x")))
    w = jax.device_put(jnp.zeros((64, 16), jnp.bfloat16), NamedSharding(MESH, P("x", None)))
    found = collectives.find(program(jnp.matmul, x, w))
    assert [c.kind for c in found] == ["all-reduce"]


@pytest.mark.parametrize(
    ("line", "kind", "size"),
    [
        ("%a = (f32[2,3]{1,0}, bf16[4]{0}) all-reduce(%x, %y), to_apply=%add", "all-reduce", 32),
        ("ROOT a.1 = (f32[2]{0}, f32[3]{0}) all-reduce-start(%x, %y)", "all-reduce", 20),
        ("%a = (f32[2]{0}, f32[16]{0}) all-gather-start(%x)", "all-gather", 64),
        (
            "%a = ((f32[2]{0}, s8[1]{0}), (f32[16]{0}, s8[8]{0})) all-gather-start(%x, %y)",
            "all-gather",
            72,
        ),
        (
            "%a = (f32[5]{0:T(256)}, f32[5]{0:T(256)}, u32[]{:S(2)}, u32[]{:S(2)})"
            " collective-permute-start(%x), source_target_pairs={{0,1}}",
            "collective-permute",
            20,
        ),
        ("%a = ((f32[16]{0}), f32[2]{0}, s32[]) reduce-scatter-start(%x)", "reduce-scatter", 8),
        ("%a = f32[<=4,2]{1,0} ragged-all-to-all(%x, %y)", "ragged-all-to-all", 32),
        ('%a = s4[3]{0} all-to-all(%x), metadata={op_name="all-gather("}', "all-to-all", 2),
        ("%a = pred[] all-reduce(%x)", "all-reduce", 1),
        ("%a = f8e4m3fn[7]{0} collective-broadcast(%x)", "collective-broadcast", 7),
        ("%a = c64[2]{0} all-reduce(%x)", "all-reduce", 16),
    ],
)
def test_forms_of_an_instruction(line, kind, size):
    assert collectives.find(f"  {line}") == [(kind, size)]


@pytest.mark.parametrize(
    "line",
    [
        "%a = f32[16]{0} all-gather-done(%start)",
        "%all-reduce.3 = f32[16]{0} bitcast(%all-reduce.2)",
        '%a = f32[2]{0} fusion(%x), calls=%f, metadata={op_name="all-reduce(x)"}',
        "// all-reduce(x) in a comment",
    ],
)
def test_what_is_no_collective(line):
    assert collectives.find(line) == []


def test_summary_adds_up_kinds_in_order():
    text = "%b = f32[4] reduce-scatter(%a)\n%a = f32[2] all-reduce(%x)\n%c = f32[3] all-reduce(%a)"
    assert collectives.summarize(text) == {"all-reduce": (2, 20), "reduce-scatter": (1, 16)}
