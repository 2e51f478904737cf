"""Weight maps: both directions, on sharded arrays, and all faults at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from isoshard.core.transfer.device_put import shard
from isoshard.core.weights import (
    Concat,
    Kernel,
    Rule,
    Split,
    SplitAxis,
    WeightError,
    WeightMap,
    attention,
    flax_names,
    linen_names,
    verify,
)
from tests.jax_faults import OF_JAX_11

P = jax.sharding.PartitionSpec


def random(*shape, dtype=np.float32):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(dtype)


BLOCK = WeightMap(
    [
        Rule("tok.weight", "embed.embedding"),
        Rule("h.{i}.fc.weight", "layers.{i}.up.kernel", Kernel()),
        Rule(
            ["h.{i}.q.weight", "h.{i}.k.weight", "h.{i}.v.weight"],
            "layers.{i}.qkv.kernel",
            Kernel(),
            Concat(1),
        ),
        Rule("h.{i}.o.weight", "layers.{i}.o.kernel", Kernel(), SplitAxis(0, (4, -1))),
    ]
)


def torch_like(layers=2):
    weights = {"tok.weight": random(10, 8)}
    for i in range(layers):
        weights |= {f"h.{i}.{name}.weight": random(8, 8) + i for name in "qkvo"}
        weights[f"h.{i}.fc.weight"] = random(16, 8) + i
    return weights


def same(a, b):
    assert sorted(a) == sorted(b)
    for name in a:
        assert a[name].dtype == b[name].dtype
        np.testing.assert_array_equal(np.asarray(a[name]), np.asarray(b[name]))


def test_there_and_back():
    source = torch_like()
    made = BLOCK.apply(source)
    assert made["layers.1.qkv.kernel"].shape == (8, 24)
    assert made["layers.0.o.kernel"].shape == (4, 2, 8)
    np.testing.assert_array_equal(made["layers.0.up.kernel"], source["h.0.fc.weight"].T)
    same(BLOCK.inverse(made), source)
    assert BLOCK.reversed.reversed == BLOCK
    x = jnp.ones((3, 4))
    assert WeightMap([Rule("a", "b")]).apply({"a": x})["b"] is x


def test_sharded_arrays_stay_where_they_are(mesh):
    specs = {
        name: P("y", "x") if ".o." in name or ".fc." in name else P(None, "x")
        for name in torch_like()
    }
    source = shard(torch_like(), mesh, specs)
    made = BLOCK.apply(source)
    assert made["layers.0.up.kernel"].sharding.spec == P("x", "y")
    assert made["layers.0.qkv.kernel"].sharding.spec == P("x")
    assert made["layers.0.o.kernel"].sharding.spec == P("x", None, "y")
    back = BLOCK.inverse(made)
    same(back, source)
    assert back["h.0.fc.weight"].sharding == source["h.0.fc.weight"].sharding


def test_data_that_would_move_is_an_error_that_lists_every_leaf(mesh):
    source = shard(torch_like(), mesh, P("x"))
    with pytest.raises(WeightError, match=r"(?s)2 errors.*h\.0\.q.*axis 1 is split.*h\.1\.q"):
        BLOCK.apply(source)


def test_under_jit():
    source = torch_like()
    made = jax.jit(BLOCK.apply)(source)
    same(made, BLOCK.apply(source))


def test_shapes_give_shapes():
    shapes = jax.eval_shape(lambda: {k: jnp.asarray(v) for k, v in torch_like().items()})
    made = BLOCK.apply(shapes)
    assert made["layers.0.qkv.kernel"] == jax.ShapeDtypeStruct((8, 24), np.float32)


def test_bits_survive():
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
    if OF_JAX_11:  # its XLA has one NaN where it transposes
        bits[bits & 0x7FFF > 0x7F80] = 0x7FC0
    source = {"w": jnp.asarray(bits).view(jnp.bfloat16)}
    weights = WeightMap([Rule("w", "k", Kernel())])
    made = weights.apply(source)
    np.testing.assert_array_equal(np.asarray(made["k"].view(jnp.uint16)), bits.T)
    np.testing.assert_array_equal(np.asarray(weights.inverse(made)["w"].view(jnp.uint16)), bits)


STACKED = WeightMap(
    [
        Rule("h.{layer}.fc.weight", "blocks.up.kernel", Kernel(), stack="layer"),
        Rule("h.{layer}.ln.weight", "blocks.ln.scale", stack="layer", stack_axis=1),
    ]
)


@pytest.mark.parametrize("place", [lambda x, mesh: x, lambda x, mesh: shard(x, mesh, P("y"))])
def test_stacked_layers(mesh, place):
    source = {f"h.{i}.fc.weight": random(16, 8) + i for i in range(3)}
    source |= {f"h.{i}.ln.weight": random(8) + i for i in range(3)}
    source = place(source, mesh)
    made = STACKED.apply(source)
    assert made["blocks.up.kernel"].shape == (3, 8, 16)
    assert made["blocks.ln.scale"].shape == (8, 3)
    np.testing.assert_array_equal(made["blocks.up.kernel"][2], source["h.2.fc.weight"].T)
    same(STACKED.inverse(made), source)


def test_layers_that_cannot_be_stacked():
    fc = random(16, 8)
    for source, match in (
        ({f"h.{i}.fc.weight": fc for i in (0, 2)}, r"also takes h\.1\.fc.*which is missing"),
        ({"h.0.fc.weight": fc, "h.1.fc.weight": random(8, 8)}, "stacks have different shapes"),
        ({"h.first.fc.weight": fc}, "layer 'first'"),
    ):
        with pytest.raises(WeightError, match=match):
            STACKED.apply(source)


def test_a_split():
    weights = WeightMap([Rule("c_attn", ["q", "k", "v"], Split(1))])
    source = {"c_attn": random(4, 12)}
    made = weights.apply(source)
    assert {name: x.shape for name, x in made.items()} == dict.fromkeys("qkv", (4, 4))
    same(weights.inverse(made), source)


def test_ties():
    weights = WeightMap(
        [
            Rule("wte.weight", "embed.embedding"),
            Rule("wte.weight", "head.kernel", Kernel(), tie=True),
        ]
    )
    source = {"wte.weight": random(10, 4)}
    made = weights.apply(source)
    np.testing.assert_array_equal(made["head.kernel"], made["embed.embedding"].T)
    same(weights.inverse(made), source)
    made["head.kernel"] = made["head.kernel"] + 1
    with pytest.raises(WeightError, match=r"head\.kernel: is tied to wte\.weight"):
        weights.inverse(made)


def test_every_fault_is_listed():
    source = {
        "tok.weight": random(10, 8),
        "h.0.fc.weight": random(16, 8),
        "h.1.fc.weight": random(16),
        "h.0.q.weight": random(8, 8),
        "odd": random(3),
    }
    like = {
        "embed": {"embedding": np.zeros((11, 8), np.float32)},
        "layers": [{"up": {"kernel": np.zeros((16, 8), np.float32)}}],
        "head": np.zeros(2, np.float32),
    }
    with pytest.raises(WeightError) as caught:
        BLOCK.apply(source, like=like)
    text = str(caught.value)
    for line in (
        "(6 errors)",
        "odd (3,): no rule takes it",
        "h.1.fc.weight (16,): Kernel() takes rank 2 to 5",
        "h.0.q.weight (8, 8)",
        "which is missing",
        "embed.embedding: shape (10, 8), but (11, 8) in like",
        "layers.0.up.kernel: shape (8, 16), but (16, 8) in like; made of h.0.fc.weight (16, 8)",
        "head (2,): no rule makes it",
    ):
        assert line in text


def test_two_sources_for_one_target():
    weights = WeightMap([Rule("a.{i}", "c.{i}"), Rule("b.{i}", "c.{i}")])
    with pytest.raises(WeightError, match=r"c\.0: made of a\.0 \(2,\) and b\.0 \(3,\)"):
        weights.apply({"a.0": random(2), "b.0": random(3)})
    like = {"b": jax.ShapeDtypeStruct((3,), jnp.bfloat16)}
    with pytest.raises(WeightError, match="b: dtype float32, but like has bfloat16"):
        WeightMap([Rule("a", "b")]).apply({"a": random(3)}, like=like)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Rule("a.{i}", "b"), "captures i are not in every pattern"),
        (lambda: Rule(["a", "b"], ["c", "d"]), "several sources become one target"),
        (lambda: Rule(None, None), "neither sources nor targets"),
        (lambda: Rule("a.{i}", "b.{i}", stack="i"), "no capture of one side only"),
        (lambda: Rule("a", "b", "transpose"), "'transpose' is no operation"),
        (lambda: WeightMap(["a"]), "made of Rules, not of 'a'"),
    ],
)
def test_a_wrong_rule_says_why(make, why):
    with pytest.raises(WeightError, match=why):
        make()


LIKE = {
    "tok": {"embedding": np.zeros((10, 8), np.float32)},
    "conv": {"kernel": np.zeros((3, 3, 2, 4), np.float32), "bias": np.zeros(4, np.float32)},
    "bn": {name: np.zeros(4, np.float32) for name in ("scale", "bias", "mean", "var")},
    "blocks": [{"up": {"kernel": np.zeros((8, 16), np.float32)}}],
    "cls": np.zeros((1, 8), np.float32),
}


def standard():
    return {
        "tok.weight": random(10, 8),
        "conv.weight": random(4, 2, 3, 3),
        "conv.bias": random(4),
        "bn.weight": random(4),
        "bn.bias": random(4),
        "bn.running_mean": random(4),
        "bn.running_var": random(4),
        "bn.num_batches_tracked": np.array(7, np.int32),
        "enc.h.0.up.weight": random(16, 8),
        "cls": random(1, 8),
    }


def test_standard_names():
    names = flax_names({"enc.h.{i}": "blocks.{i}"})
    source = standard()
    made = names.apply(source, like=LIKE)
    np.testing.assert_array_equal(
        made["conv"]["kernel"], source["conv.weight"].transpose(2, 3, 1, 0)
    )
    np.testing.assert_array_equal(made["bn"]["var"], source["bn.running_var"])
    same(names.inverse(made, like=source), source)


def test_standard_names_of_linen():
    source = {name: x for name, x in standard().items() if name.startswith("bn")}
    like = {
        "params": {"bn": {"scale": random(4), "bias": random(4)}},
        "batch_stats": {"bn": {"mean": random(4), "var": random(4)}},
    }
    names = linen_names()
    made = names.apply(source, like=like)
    np.testing.assert_array_equal(made["batch_stats"]["bn"]["mean"], source["bn.running_mean"])
    same(names.inverse(made, like=source), source)


def test_without_like_standard_names_are_not_guessed():
    with pytest.raises(WeightError, match=r"a\.weight \(4, 8\): could become a\.kernel or"):
        flax_names().apply({"a.weight": random(4, 8)})


def test_heads():
    names = WeightMap(attention("a", "a", heads=2))
    source = {f"a.{n}_proj.weight": random(8, 6) for n in "qkv"}
    source |= {f"a.{n}_proj.bias": random(8) for n in "qkv"}
    source |= {"a.out_proj.weight": random(6, 8), "a.out_proj.bias": random(6)}
    made = names.apply(source)
    assert made["a.query.kernel"].shape == (6, 2, 4)
    assert made["a.out.kernel"].shape == (2, 4, 6)
    same(names.inverse(made), source)


def test_explain():
    text = BLOCK.explain(torch_like(1))
    assert "h.0.fc.weight (16, 8) -> layers.0.up.kernel (8, 16)  [Kernel()]" in text


def test_verify_names_what_differs():
    with pytest.raises(
        WeightError, match=r"(?s)2 errors.*b: only one.*a: shape \(2,\), and \(3,\)"
    ):
        pass_a = {"a": np.ones(2), "b": np.ones(1)}
        verify(lambda: pass_a, lambda: {"a": np.ones(3)})
    with pytest.raises(WeightError, match="1 of 2 elements"):
        verify(lambda: np.array([1.0, np.nan]), lambda: np.ones(2))
    assert verify(lambda: np.array([np.nan]), lambda: np.array([np.nan])).largest == 0
