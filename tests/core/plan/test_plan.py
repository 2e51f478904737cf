"""Plans: matching, the same rules for two frameworks, errors that name every leaf, the table."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.errors import ShardingError
from isoshard.core.layout.mesh import make_mesh
from isoshard.core.plan import Conv, Linear, Plan, PlanError

TORCH = {
    "tok.weight": (256, 32),
    "blocks.0.norm1.weight": (32,),
    "blocks.0.attn.qkv.weight": (96, 32),
    "blocks.0.attn.qkv.bias": (96,),
    "blocks.0.attn.proj.weight": (32, 32),
    "blocks.0.mlp.down.weight": (32, 128),
    "head.weight": (256, 32),
}
FLAX = {
    "tok.embedding": (256, 32),
    "blocks.0.norm1.scale": (32,),
    "blocks.0.attn.qkv.kernel": (32, 96),
    "blocks.0.attn.qkv.bias": (96,),
    "blocks.0.attn.proj.kernel": (32, 32),
    "blocks.0.mlp.down.kernel": (128, 32),
    "head.kernel": (32, 256),
}
PLAN = Plan(
    {
        "tok.*": P("model", None),
        "*.qkv.*": Linear(out="model"),
        "re:.*[.](proj|down)[.].*": Linear(into="model"),
        "head.*": Linear(out=("data", "model")),
        "*.norm?.*": None,
    }
)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh((2, 4), ("data", "model"))


def test_one_plan_serves_torch_and_flax_names(mesh):
    torch_specs = PLAN.resolve(TORCH, mesh).specs
    flax_specs = PLAN.resolve(FLAX, mesh).specs
    assert list(torch_specs.values()) == [
        P("model"),
        P(),
        P("model"),
        P("model"),
        P(None, "model"),
        P(None, "model"),
        P(("data", "model")),
    ]
    assert list(flax_specs.values()) == [
        P("model"),
        P(),
        P(None, "model"),
        P("model"),
        P("model"),
        P("model"),
        P(None, ("data", "model")),
    ]


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("*.weight", "a.b.weight", True),
        ("*.weight", "weight", False),
        ("a.?.w", "a.3.w", True),
        ("a.?.w", "a.12.w", False),
        ("a.[0-3].w", "a.7.w", False),
        ("A.w", "a.w", False),
        ("re:a[.]\\d+[.]w", "a.12.w", True),
        ("re:a", "a.w", False),
    ],
)
def test_patterns_match_whole_names(mesh, pattern, name, matches):
    for rules in ([(pattern, P("data"))], [(pattern, P("data")), ("*", P("model"))]):
        spec = Plan(rules, default=P("model")).spec_for(name, (8,), mesh)  # the first match wins
        assert spec == (P("data") if matches else P("model"))


def test_small_leaves_without_a_rule_are_replicated(mesh):
    resolved = Plan().resolve({"scale": (8,)}, mesh)
    assert resolved.specs == {"scale": P()}
    assert resolved.unmatched == ("scale",)
    assert resolved.leaves[0].rule == "(small)"
    for rules in ({}, [], ()):
        assert Plan(rules) == Plan()


def test_large_leaves_without_a_rule_are_all_named(mesh):
    leaves = {
        "a.weight": jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16),
        "b": jax.ShapeDtypeStruct((), jnp.float32),
        "c.weight": jax.ShapeDtypeStruct((1024, 512), jnp.float32),
    }
    with pytest.raises(PlanError) as caught:
        Plan().resolve(leaves, mesh)
    assert str(caught.value).splitlines() == [
        "2 leaves larger than 1.0 MiB match no rule:",
        "  a.weight: shape (1024, 1024), bfloat16, 2.0 MiB",
        "  c.weight: shape (1024, 512), float32, 2.0 MiB",
        "Add a rule for each (None replicates on purpose), or give the plan a default: "
        "Plan(.., default=P()).",
    ]


def test_the_size_limit_is_inclusive_and_adjustable(mesh):
    assert Plan(replicate_below=32).spec_for("w", (8,), mesh) == P()
    with pytest.raises(ShardingError, match=r"1 leaf larger than 31 B matches no rule:\n  w: "):
        Plan(replicate_below=31).spec_for("w", (8,), mesh)
    for default in (P(), None):
        plan = Plan(default=default)
        assert plan.spec_for("w", (4096, 4096), mesh) == P()
        assert plan.resolve({"w": (8,)}, mesh).leaves[0].rule == "(default)"
    resolved = Plan({"w": None}).resolve({"w": (4096, 4096)}, mesh)  # on purpose
    assert resolved.specs == {"w": P()} and resolved.unmatched == ()


def test_specs_that_do_not_fit_are_gathered(mesh):
    plan = Plan({"a": P("modle"), "b": P("data", "model"), "c": P("model"), "d": P("data")})
    with pytest.raises(PlanError) as caught:
        plan.resolve({"a": (8,), "b": (8,), "c": (6,), "d": (8,), "e": (1 << 20,)}, mesh)
    message = str(caught.value)
    assert message.startswith("the specs of 3 leaves do not fit:\n")
    assert re.search(r"a.*'modle'.*\[rule 'a'\]", message)
    assert re.search(r"b.*rank 1.*\[rule 'b'\]", message)
    assert re.search(r"c.*\[rule 'c'\]", message)
    assert "[rule 'd']" not in message
    assert "1 leaf larger than 1.0 MiB matches no rule:\n  e: shape (1048576,)" in message


def test_linear_and_conv_know_both_orders():
    assert Linear("o", "i").spec("l.weight", 2) == P("o", "i")
    assert Linear("o", "i").spec("l.kernel", 2) == P("i", "o")
    assert Linear("o", "i").spec("l.bias", 1) == P("o")
    assert Linear("o", "i").spec("attn.in_proj_weight", 2) == P("o", "i")
    assert Linear("o", "i").spec("kernel", 2) == P("i", "o")
    assert Conv("o", "i").spec("c.weight", 4) == P("o", "i")
    assert Conv("o", "i").spec("c.kernel", 4) == P(None, None, "i", "o")
    assert Conv("o").spec("c.bias", 1) == P("o")


@pytest.mark.parametrize(
    ("rule", "name", "ndim", "message"),
    [
        (
            Linear("o"),
            "n.scale",
            1,
            r"n\.scale: Linear\(out='o', into=None\) .* not 'scale' of rank 1",
        ),
        (Linear("o"), "q.kernel", 3, r"q\.kernel: .* of rank 2 .* not 'kernel' of rank 3"),
        (Conv("o"), "c.weight", 2, r"c\.weight: Conv.* of rank 3 to 5 .* not 'weight' of rank 2"),
        (Linear("o"), "a.unweight", 2, r"not 'unweight' of rank 2; give this leaf a rule with"),
    ],
)
def test_layer_rules_refuse_what_they_do_not_know(rule, name, ndim, message):
    with pytest.raises(PlanError, match=message):
        rule.spec(name, ndim)


def test_layer_rules_that_do_not_fit_are_gathered_too(mesh):
    plan = Plan({"*": Linear(out="model")})
    with pytest.raises(PlanError, match=r"2 leaves do not fit:\n  a\.scale: .*\n  b\.scale: "):
        plan.resolve({"a.scale": (8,), "b.scale": (8,), "c.bias": (8,)}, mesh)


def test_a_plan_is_a_value():
    rules = {"*.w": ["data", None], "*": None}
    plan = Plan(rules, default=P())
    rules["late"] = P("data")
    assert plan == Plan([("*.w", ("data", None)), ("*", None)], default=P())
    assert hash(plan) == hash(Plan([("*.w", ("data", None)), ("*", None)], default=P()))
    assert plan != Plan([("*", None), ("*.w", ("data", None))], default=P())
    assert Plan() != Plan(default=None)
    assert eval(repr(plan)) == plan
    assert eval(repr(PLAN)) == PLAN
    assert repr(Plan(replicate_below=8)) == "Plan({}, replicate_below=8)"
    with pytest.raises(AttributeError, match="rules"):
        plan.rules = ()


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([("a", None), ("a", P())], "'a' is repeated"),
        ({3: None}, "3 is not a string"),
        ({"re:(": None}, r"'re:\(' is not a regular expression: .*unterminated"),
        ({"re:(": None, 3: None}, "3 is not a string; 're:"),
    ],
)
def test_malformed_patterns(rules, message):
    with pytest.raises(PlanError, match=message):
        Plan(rules)


def test_trees_are_named_by_path(mesh):
    tree = {"blocks": [{"w": np.zeros((8, 4), np.float32)}], "step": 3, "lr": 0.1}
    resolved = Plan({"blocks.*.w": P("data")}).resolve(tree, mesh)
    assert resolved.specs == {"blocks.0.w": P("data"), "lr": P(), "step": P()}
    layout = resolved.shardings_like(tree)
    assert layout["blocks"][0]["w"] == NamedSharding(mesh, P("data"))
    placed = jax.jit(lambda t: t, out_shardings=layout)(tree)
    assert placed["blocks"][0]["w"].sharding == NamedSharding(mesh, P("data"))


def test_leaves_that_are_no_arrays_are_named(mesh):
    with pytest.raises(PlanError, match=r"arrays and numbers, not:\n  a: str\n  b\.0: object"):
        Plan().resolve({"a": "x", "b": [object()], "c": 1.0}, mesh)


def test_the_table(mesh):
    leaves = {
        "tok.weight": jax.ShapeDtypeStruct((256, 32), jnp.float32),
        "scale": jax.ShapeDtypeStruct((8,), jnp.bfloat16),
    }
    table = str(Plan({"tok.*": P("model", "data"), "nope": None}).resolve(leaves, mesh))
    assert table.splitlines() == [
        "name        shape      dtype     spec                bytes/device  rule",
        "scale       (8,)       bfloat16  P()                         16 B  (small)",
        "tok.weight  (256, 32)  float32   P('model', 'data')       4.0 KiB  tok.*",
        "total 4.0 KiB on each of 8 devices, mesh (data=2, model=4)",
        "matched by no rule, so by default: scale",
        "rules that decided nothing: 'nope'",
    ]


def test_optimizer_state_follows_its_parameter(mesh):
    params = {"tok": {"w": np.zeros((8, 4))}, "enc": {"tok": {"w": np.zeros((8, 4))}}}
    plan = Plan({"tok.*": P("data"), "enc.*": P("model")})
    state = ({"mu": params, "nu": params}, {"count": np.zeros(())})
    specs = plan.for_state(params).resolve(state, mesh).specs
    assert specs == {
        "0.mu.tok.w": P("data"),
        "0.nu.tok.w": P("data"),
        "0.mu.enc.tok.w": P("model"),
        "0.nu.enc.tok.w": P("model"),
        "1.count": P(),
    }


def test_state_of_a_parameter_without_a_rule_still_needs_one(mesh):
    plan = Plan().for_state({"w": (4096, 4096)})
    assert plan == Plan()
    with pytest.raises(PlanError, match=r"matches no rule:\n  0\.mu\.w"):
        plan.resolve({"0.mu.w": (4096, 4096)}, mesh)


class TestMeshes:
    """A plan goes by sizes and names; layouts are over the mesh that is given, or set."""

    def test_every_kind(self):
        want = PLAN.resolve(TORCH, make_mesh((2, 4), ("data", "model"), axis_types=AxisType.Auto))
        for kinds in ((AxisType.Explicit,) * 2, (AxisType.Explicit, AxisType.Auto)):
            mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=kinds)
            for given in (mesh, mesh.abstract_mesh, AbstractMesh((2, 4), ("data", "model"))):
                found = PLAN.resolve(TORCH, given)
                assert found.mesh is given
                assert found.specs == want.specs
                assert {one.mesh for one in found.shardings.values()} == {given}
                assert str(found) == str(want)
                assert not want.diff(found)
            with jax.set_mesh(mesh):
                assert PLAN.resolve(TORCH).shardings == PLAN.resolve(TORCH, mesh).shardings
                assert PLAN.spec_for("head.weight", (256, 32)) == P(("data", "model"))
                assert not PLAN.diff(PLAN, TORCH)
                inside = _resolved_in_jit()
            assert inside.mesh == mesh.abstract_mesh
            assert inside.specs == want.specs

    def test_none_is_given_and_none_is_set(self):
        with pytest.raises(ShardingError, match=r"set_mesh has set none; .*plan\.resolve\(tree, m"):
            PLAN.resolve(TORCH)


def _resolved_in_jit():
    found = []
    jax.jit(lambda: found.append(PLAN.resolve(TORCH)))()
    return found[0]
