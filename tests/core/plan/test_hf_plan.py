"""Hugging Face tensor-parallel plans: every style, precedence of names, sources, refusals."""

import pytest
from jax.sharding import PartitionSpec as P

from isoshard.core.layout.mesh import make_mesh
from isoshard.core.plan import Plan, PlanError
from isoshard.core.plan.hf_plan import STYLES, HfStyle

# What each style does to weight[out, in], to its bias, and to experts[expert, out, in].
EXPECTED = {
    "colwise": (P("model"), P("model"), P(None, "model")),
    "rowwise": (P(None, "model"), P(), P(None, None, "model")),
    "embedding_rowwise": (P("model"), P("model"), P("model")),
    "grouped_gemm": (P("model"), P("model"), P("model")),
    "replicate": (P(), P(), P()),
}
ALIKE = {
    "colwise_rep": "colwise",
    "colwise_gather_output": "colwise",
    "packed_colwise": "colwise",
    "local_colwise": "colwise",
    "local_packed_colwise": "colwise",
    "rowwise_rep": "rowwise",
    "rowwise_split_input": "rowwise",
    "packed_rowwise": "rowwise",
    "local_rowwise": "rowwise",
    "local_packed_rowwise": "rowwise",
    **dict.fromkeys(
        (
            "all_reduce",
            "ep_dispatch_experts",
            "ep_router",
            "gather",
            "local",
            "local_params",
            "mla_kv_a_proj",
            "moe_identity_expert",
            "moe_tp_experts",
            "replicated_with_grad_allreduce",
            "sequence_parallel",
        ),
        "replicate",
    ),
}


@pytest.fixture(scope="module")
def mesh():
    return make_mesh((2, 4), ("data", "model"))


class Model:
    def __init__(self, *names, **plans):
        self.names = names
        vars(self).update(plans)

    def named_parameters(self):
        return [(name, None) for name in self.names]


def test_each_style_on_a_weight_a_bias_and_stacked_experts(mesh):
    assert {*EXPECTED, *ALIKE, "embedding_colwise"} == set(STYLES)
    shapes = {"m.weight": (8, 16), "m.bias": (8,), "m.stack": (4, 8, 16)}
    for style in (*EXPECTED, *ALIKE):
        plan = Plan.from_hf_tp_plan({"m": style})
        expected = EXPECTED[ALIKE.get(style, style)]
        assert tuple(plan.resolve(shapes, mesh).specs.values()) == expected, style


def test_an_embedding_by_feature(mesh):
    plan = Plan.from_hf_tp_plan({"tok": "embedding_colwise"}, axis=("data", "model"))
    assert plan.spec_for("tok.weight", (3, 16), mesh) == P(None, ("data", "model"))
    with pytest.raises(PlanError, match=r"m\.scale: the style 'embedding_colwise' splits axis 1"):
        HfStyle("embedding_colwise", "model").spec("m.scale", 1)


def test_a_number_beside_the_weights_is_whole():
    """Gemma's embeddings have their scale as a buffer."""
    for style in STYLES:
        assert HfStyle(style, "model").spec("embed_tokens.embed_scale", 0) == P()


def test_a_parameters_name_goes_before_its_modules(mesh):
    plan = Plan.from_hf_tp_plan(
        {
            "layers.*.experts": "moe_tp_experts",
            "layers.*.experts.gate_up_proj": "packed_colwise",
            "layers.*.experts.down_proj": "rowwise",
        }
    )
    shapes = {
        "layers.0.experts.gate_up_proj": (4, 32, 8),
        "layers.11.experts.down_proj": (4, 8, 16),
        "layers.0.experts.bias": (4,),
    }
    specs = plan.resolve(shapes, mesh).specs
    assert tuple(specs.values()) == (P(None, "model"), P(None, None, "model"), P())


def test_a_star_is_a_number_and_a_name_reaches_one_level(mesh):
    plan = Plan.from_hf_tp_plan({"layers.*.up": "colwise", "layers.0.up": "rowwise"})
    shapes = {
        "layers.0.up.weight": (8, 8),  # the exact name goes before the star
        "layers.3.up.weight": (8, 8),
        "layers.last.up.weight": (8, 8),
        "layers.3.up.lora.weight": (8, 8),
        "vision.layers.3.up.weight": (8, 8),
    }
    specs = plan.resolve(shapes, mesh).specs
    assert tuple(specs.values()) == (P(None, "model"), P("model"), P(), P(), P())


def test_objects_that_carry_a_plan(mesh):
    for attribute in ("tp_plan", "_tp_plan", "base_model_tp_plan"):
        source = Model("up.weight", **{attribute: {"up": "colwise"}})
        assert Plan.from_hf_tp_plan(source).spec_for("up.weight", (8, 8), mesh) == P("model")


def test_a_prefix_and_a_default(mesh):
    plan = Plan.from_hf_tp_plan({"up": "colwise"}, prefix="model.", default=P("data"))
    assert plan.spec_for("model.up.weight", (8, 8), mesh) == P("model")
    assert plan.spec_for("up.weight", (8, 8), mesh) == P("data")


def test_what_is_refused():
    with pytest.raises(
        PlanError, match=r"(?s)  up: 'colwize'\n.*known ones are colwise, .*rowwise"
    ):
        Plan.from_hf_tp_plan({"up": "colwize", "down": "rowwise"})
    with pytest.raises(
        PlanError, match=r"Model carries no tensor-parallel plan .*Plan.tensor_parallel"
    ):
        Plan.from_hf_tp_plan(Model(tp_plan={}))
    with pytest.raises(
        PlanError, match=r"no name of the plan fits a parameter of Model.*model\.up"
    ):
        Plan.from_hf_tp_plan(Model("model.up.weight", tp_plan={"up": "colwise"}))


def test_a_size_that_does_not_divide_is_named(mesh):
    plan = Plan.from_hf_tp_plan({"head": "colwise_gather_output"})
    with pytest.raises(PlanError, match=r"head\.weight.*130"):
        plan.resolve({"head.weight": (130, 8)}, mesh)


def test_a_plan_from_hugging_face_prints_and_hashes():
    plan = Plan.from_hf_tp_plan({"up": "colwise"})
    assert (
        repr(plan) == "Plan({'re:up(?:[.][^.]+)?': HfStyle('colwise', axis='model')}, default=None)"
    )
    assert plan == Plan.from_hf_tp_plan({"up": "colwise"})
    assert hash(plan) == hash(Plan.from_hf_tp_plan({"up": "colwise"}))
