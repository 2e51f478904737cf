"""Products and presets: axes merged, conflicts named, the names of well-known models."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import isoshard as iso
from isoshard.core.layout.mesh import make_mesh
from isoshard.core.plan import Experts, Heads, Largest, Linear, Plan, PlanError

TP = Plan.tensor_parallel("tp")
FSDP = Plan.fsdp("fsdp", min_bytes=0)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh((2, 4), ("fsdp", "tp"))


@pytest.fixture(scope="module")
def cube():
    return make_mesh((2, 2, 2), ("dp", "fsdp", "tp"))


@pytest.mark.parametrize("plan", [FSDP * TP, TP * FSDP], ids=["fsdp first", "tp first"])
def test_fsdp_splits_what_tensor_parallelism_leaves(mesh, plan):
    shapes = {
        "l.0.q_proj.weight": (32, 32),
        "l.0.o_proj.weight": (32, 32),
        "l.0.q_proj.kernel": (32, 32),
        "l.0.o_proj.kernel": (32, 32),
        "l.0.q_proj.bias": (32,),
        "l.0.norm.weight": (32,),
    }
    assert list(plan.resolve(shapes, mesh).specs.values()) == [
        P("tp", "fsdp"),
        P("fsdp", "tp"),
        P("fsdp", "tp"),
        P("tp", "fsdp"),
        P(("tp", "fsdp")),
        P("fsdp"),
    ]


def test_of_one_axis_that_both_split_fsdp_has_the_inner_part(mesh):
    assert (FSDP * TP).spec_for("q_proj.weight", (32, 7), mesh) == P(("tp", "fsdp"))
    with pytest.raises(PlanError, match=r"a: shape \(4,\).*no multiple of its 8 shards"):
        (Plan({"*": P("tp")}) * Plan({"*": P("fsdp")})).resolve({"a": (4,)}, mesh)
    with pytest.raises(PlanError, match=r"of rank 2 or 3"):
        Heads(out="a", into="b").spec("query.kernel", 3)
    assert Heads("a", "b").spec("query.kernel", 2) == Linear("a", "b").spec("query.kernel", 2)
    with pytest.raises(PlanError, match=r"q_proj\.weight: no axis of shape \(4, 7\).* 2 shards"):
        (FSDP * TP).spec_for("q_proj.weight", (4, 7), mesh)


def test_a_mesh_axis_that_splits_two_axes_is_a_conflict(mesh):
    plan = Plan({"*": P("tp")}) * Plan({"*": P(None, "tp")})
    with pytest.raises(PlanError) as caught:
        plan.resolve({"a": (8, 8), "b": (8, 8)}, mesh)
    assert "2 leaves do not fit" in str(caught.value)
    assert "b: the factors of the plan disagree: mesh axis 'tp' splits axis 0" in str(caught.value)
    assert (Plan({"*": P("tp")}) * Plan({"*": P("tp")})).spec_for("a", (8,), mesh) == P("tp")
    both = Plan.fsdp("tp", min_bytes=0) * TP
    with pytest.raises(PlanError, match=r"splits axis 0 .* and axis 1"):
        both.spec_for("q_proj.weight", (32, 32), mesh)


def test_defaults_of_factors(mesh):
    large = {"odd": (1024, 1024)}
    assert (Plan.data_parallel("fsdp") * Plan(default=P("tp"))).resolve(large, mesh).specs == {
        "odd": P("tp")
    }
    with pytest.raises(PlanError, match=r"1 leaf larger than 1\.0 MiB matches no rule:\n  odd"):
        (Plan.data_parallel("fsdp") * TP).resolve(large, mesh)
    resolved = (Plan.data_parallel("fsdp") * TP).resolve({"q_proj.bias": (8,), "s": (8,)}, mesh)
    assert [leaf.rule for leaf in resolved.leaves] == ["column", "(small)"]
    assert resolved.specs["q_proj.bias"] == P("tp")


@pytest.mark.parametrize(
    "beside",
    [Plan(memory={"*.mu": "pinned_host"}), Plan(dcn={"fsdp": "all-reduce"}), Plan()],
    ids=["memory", "dcn", "nothing"],
)
def test_a_factor_that_lays_nothing_out_leaves_the_defaults(mesh, beside):
    large = {"odd": (1024, 1024)}
    for plan in (Plan(default=P("tp")) * beside, beside * Plan(default=P("tp"))):
        assert plan.resolve(large, mesh).specs == {"odd": P("tp")}
    with pytest.raises(PlanError, match="matches no rule"):
        (beside * beside).resolve(large, mesh)


def test_a_product_is_a_value():
    plan = Plan.data_parallel("dp") * FSDP * TP
    assert plan == Plan.data_parallel("dp") * (FSDP * TP)
    assert hash(plan) == hash(Plan.data_parallel("dp") * FSDP * TP)
    assert eval(repr(plan)) == plan
    assert len(plan.factors) == 3
    with pytest.raises(TypeError, match="unsupported operand"):
        plan * 3


def test_otherwise_puts_rules_before(mesh):
    own = Plan({"q_proj.*": P(None, "tp")})
    assert own.otherwise(TP).spec_for("q_proj.weight", (32, 32), mesh) == P(None, "tp")
    assert own.otherwise(TP).spec_for("v_proj.weight", (32, 32), mesh) == P("tp")
    both = Plan({"q_proj.*": None}).otherwise(FSDP * TP)
    assert both.spec_for("q_proj.weight", (32, 32), mesh) == P()
    assert both.spec_for("v_proj.weight", (32, 32), mesh) == P("tp", "fsdp")
    logical = Plan({"q_proj.*": ("a",)}, axes={"a": "fsdp"}).otherwise(FSDP * TP)
    assert logical.spec_for("q_proj.weight", (32, 32), mesh) == P("fsdp")
    with pytest.raises(PlanError, match="a product has no single list of rules"):
        both.otherwise(TP)


def test_inputs(cube):
    plan = Plan.data_parallel("dp") * FSDP * TP
    batch = {"tokens": np.zeros((8, 16), np.int32), "mask": np.zeros((8, 16), bool)}
    assert plan.for_inputs().resolve(batch, cube).specs == dict.fromkeys(
        ("mask", "tokens"), P(("dp", "fsdp"))
    )
    placed = iso.shard(batch, cube, plan.for_inputs())
    assert placed["tokens"].sharding.spec == P(("dp", "fsdp"))
    some = Plan(inputs={"mask": None, "*": ("batch", None)}, axes={"batch": "dp"})
    assert some.for_inputs().resolve(batch, cube).specs == {"mask": P(), "tokens": P("dp")}
    with pytest.raises(PlanError, match="has no rule for inputs"):
        TP.for_inputs()


def test_state_follows_through_a_product(mesh):
    params = {
        "q_proj": {"weight": jax.ShapeDtypeStruct((32, 32), jnp.bfloat16)},
        "norm": {"weight": jax.ShapeDtypeStruct((32,), jnp.bfloat16)},
    }
    plan = Plan.fsdp("fsdp", min_bytes=100) * TP
    state = {"mu": jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), params)}
    assert plan.resolve(params, mesh).specs == {
        "norm.weight": P(),
        "q_proj.weight": P("tp", "fsdp"),
    }
    found = plan.for_state(params).resolve({**state, "step": 0}, mesh).specs
    assert found == {
        "mu.norm.weight": P(),  # 128 bytes here; the parameter has 64 and is whole
        "mu.q_proj.weight": P("tp", "fsdp"),
        "step": P(),
    }


def test_strict(mesh):
    plan = Plan({"w": P("tp"), "typo": None})
    plan.resolve({"w": (8,), "b": (8,)}, mesh)
    with pytest.raises(PlanError) as caught:
        plan.resolve({"w": (8,), "b": (8,), "c": (2,)}, mesh, strict=True)
    assert str(caught.value).splitlines()[1:] == [
        "  rule 'typo' decides nothing",
        "  b: no rule matches",
        "  c: no rule matches",
    ]
    Plan({"*": P("tp")}).resolve({"w": (8,)}, mesh, strict=True)


@pytest.mark.parametrize(
    ("name", "shape", "spec", "rule"),
    [
        # GPT-2
        ("transformer.wte.weight", (64, 32), P("tp"), "embedding"),
        ("transformer.wpe.weight", (16, 32), P(), "whole"),
        ("transformer.h.0.ln_1.weight", (32,), P(), "whole"),
        ("transformer.h.11.attn.c_attn.weight", (96, 32), P("tp"), "column"),
        ("transformer.h.11.attn.c_proj.bias", (32,), P(), "row"),
        ("transformer.h.11.mlp.c_proj.kernel", (128, 32), P("tp"), "row"),
        # Llama and its kin
        ("model.layers.3.self_attn.k_proj.weight", (32, 32), P("tp"), "column"),
        ("model.layers.3.self_attn.q_norm.weight", (8,), P(), "whole"),
        ("model.layers.3.mlp.gate_proj.weight", (64, 32), P("tp"), "column"),
        ("model.layers.3.mlp.down_proj.weight", (32, 64), P(None, "tp"), "row"),
        ("model.layers.3.post_attention_layernorm.weight", (32,), P(), "whole"),
        # BERT
        ("bert.embeddings.word_embeddings.weight", (64, 32), P("tp"), "embedding"),
        ("bert.encoder.layer.0.attention.self.query.weight", (32, 32), P("tp"), "column"),
        ("bert.encoder.layer.0.attention.output.dense.weight", (32, 32), P(None, "tp"), "row"),
        ("bert.encoder.layer.0.intermediate.dense.bias", (64,), P("tp"), "column"),
        ("bert.encoder.layer.0.output.dense.kernel", (64, 32), P("tp"), "row"),
        # Flax's attention keeps heads apart
        ("blocks.0.attn.query.kernel", (32, 4, 8), P(None, "tp"), "column"),
        ("blocks.0.attn.value.bias", (4, 8), P("tp"), "column"),
        ("blocks.0.attn.out.kernel", (4, 8, 32), P("tp"), "row"),
    ],
)
def test_tensor_parallel_names(mesh, name, shape, spec, rule):
    (leaf,) = TP.resolve({name: shape}, mesh).leaves
    assert (leaf.sharding.spec, leaf.rule) == (spec, rule)


def test_the_order_of_a_conv1d(mesh):
    plan = Plan.tensor_parallel("tp", weights="in_out")
    assert plan.spec_for("h.0.attn.c_attn.weight", (32, 96), mesh) == P(None, "tp")
    assert plan.spec_for("h.0.attn.c_proj.weight", (32, 32), mesh) == P("tp")
    assert plan.spec_for("h.0.attn.c_attn.bias", (96,), mesh) == P("tp")
    with pytest.raises(PlanError, match="weights is 'out_in' or 'in_out', not 'oi'"):
        Plan.tensor_parallel("tp", weights="oi")  # type: ignore[arg-type]


def test_a_vocabulary_that_does_not_divide_is_an_error(mesh):
    with pytest.raises(PlanError, match=r"wte\.weight: shape \(50257, 32\).*Pad it to 50260"):
        TP.resolve({"wte.weight": (50257, 32)}, mesh)


def test_experts(mesh):
    plan = Plan.expert_parallel("tp") * FSDP
    shapes = {
        "h.0.moe.experts.up": (8, 64, 32),
        "h.0.moe.experts.bias": (8,),
        "h.0.moe.router.weight": (8, 32),
    }
    assert list(plan.resolve(shapes, mesh).specs.values()) == [
        P("tp", "fsdp"),
        P(("tp", "fsdp")),
        P(None, "fsdp"),
    ]
    with pytest.raises(PlanError, match=r"experts\.0\.up\.weight: .* a module of its own; stack"):
        plan.resolve({"experts.0.up.weight": (64, 32)}, mesh)
    assert Experts("ep", "specialists").spec("specialists.up", 3) == P("ep")


@pytest.mark.parametrize(
    ("name", "shape", "spec"),
    [
        ("w.weight", (16, 16), P("fsdp")),  # a tie: the output features
        ("w.kernel", (16, 16), P(None, "fsdp")),
        ("w.embedding", (16, 16), P("fsdp")),
        ("c.weight", (8, 4, 3, 3), P("fsdp")),
        ("c.kernel", (3, 3, 4, 8), P(None, None, None, "fsdp")),
        ("w.weight", (15, 4), P(None, "fsdp")),  # the largest that divides
        ("scale", (), P()),
    ],
)
def test_the_largest_axis_that_divides(mesh, name, shape, spec):
    assert FSDP.spec_for(name, shape, mesh) == spec


def test_fsdp_leaves_the_small_and_refuses_the_odd(mesh):
    assert Plan.fsdp().spec_for("b", (1024,), mesh) == P()
    assert Plan.fsdp(("fsdp", "tp")).spec_for("w", (1024, 512), mesh) == P(("fsdp", "tp"))
    with pytest.raises(PlanError, match=r"(?s)2 leaves.*u: no axis.*multiple of its 2 shards.*v: "):
        FSDP.resolve({"u": (3, 5), "v": (7,), "w": (8,)}, mesh)
    with pytest.raises(PlanError, match="no mesh axis is called 'fdsp'"):
        Plan.fsdp("fdsp").spec_for("w", (8,), mesh)
    assert Largest("x", 100).settled(99) is None
    assert Largest("x", 100).settled(100) == Largest("x", 0)
