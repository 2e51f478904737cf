"""Plans that leave most bytes whole by chance say so once; those that mean it do not."""

import warnings

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import isoshard as iso
from isoshard import Plan
from isoshard.core.plan.replication_warning import replication_message, warn_replicated
from isoshard.rules import Largest, Linear

GPT_OSS = {
    "model.embed_tokens.weight": (256, 64),
    "model.layers.0.self_attn.q_proj.weight": (64, 64),
    "model.layers.0.mlp.router.weight": (8, 64),
    "model.layers.0.mlp.experts.gate_up_proj": (8, 64, 2048),
    "model.layers.0.mlp.experts.gate_up_proj_bias": (8, 2048),
    "model.layers.0.mlp.experts.down_proj": (8, 1024, 64),
    "model.layers.0.mlp.experts.down_proj_bias": (8, 64),
    "lm_head.weight": (256, 64),
}
HEAD = {"lm_head": "colwise_gather_output"}


@pytest.fixture(scope="module")
def mesh():
    return iso.make_mesh((2, 4), ("data", "model"))


def said(plan, mesh, shapes=GPT_OSS):
    return replication_message(plan, plan.resolve(shapes, mesh))


def test_the_largest_leaves_and_what_to_write(mesh):
    message = said(Plan.from_hf_tp_plan(HEAD, "model"), mesh)
    assert message.startswith("the plan replicates 99 % of the parameters' bytes on every device")
    lines = message.splitlines()
    assert lines[1].startswith("  model.layers.0.mlp.experts.gate_up_proj: shape (8, 64, 2048)")
    assert 'Plan({"*experts*": P("model")}).otherwise(plan)' in lines[-1]
    better = Plan({"*experts*": P("model")}).otherwise(Plan.from_hf_tp_plan(HEAD, "model"))
    assert said(better, mesh) is None


def test_small_leaves_of_fsdp(mesh):
    shapes = {f"{n}.weight": (256, 512) for n in range(4)}
    assert "below the min_bytes of rule 'fsdp'" in said(Plan.fsdp("data"), mesh, shapes)
    assert said(Plan.fsdp("data", min_bytes=0), mesh, shapes) is None


@pytest.mark.parametrize(
    "plan",
    [
        Plan({"*": None}),
        Plan({"*": P()}),
        Plan.data_parallel("data"),
        Plan({"lm_head.*": P("model")}, default=P()),
        Plan({"lm_head.*": P("model"), "*": None}),
        Plan.from_hf_tp_plan(HEAD, "model", default=P()),
        Plan({"lm_head.*": Linear(out="model")}, default=None),
        Plan.tensor_parallel("model") * Plan.data_parallel("data"),
    ],
)
def test_plans_that_mean_it(mesh, plan):
    assert said(plan, mesh) is None


def test_what_no_axis_would_divide_and_small_models(mesh):
    plan = Plan.from_hf_tp_plan(HEAD, "model")
    assert said(plan, mesh, {"lm_head.weight": (8, 4), "odd": (1023, 1023)}) is None
    assert said(plan, mesh, {"lm_head.weight": (8, 4), "small": (64, 64)}) is None
    assert said(plan, iso.make_mesh((8, 1), ("data", "model"))) is None


def test_once_and_where_a_model_is_laid_out(mesh):
    plan = Plan.from_hf_tp_plan({"head": "colwise"}, "model")
    params = {"head": {"weight": np.ones((8, 4))}, "experts": np.ones((8, 256, 256), np.float32)}
    with pytest.warns(iso.errors.ReplicationWarning, match="experts: shape"):
        iso.shard(params, mesh, plan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        iso.shard(params, mesh, plan)
        warn_replicated(P(), None)


def test_tensor_parallel_splits_stacked_experts(mesh):
    found = Plan.tensor_parallel("model").resolve(GPT_OSS, mesh).specs
    assert {found[name] for name in GPT_OSS if "experts" in name} == {P("model")}
    assert said(Plan.tensor_parallel("model"), mesh) is None
    both = Plan.expert_parallel("data") * Plan.tensor_parallel("model")
    found = both.resolve(GPT_OSS, mesh).specs
    assert found["model.layers.0.mlp.experts.gate_up_proj"] == P("data", None, "model")
    assert found["model.layers.0.mlp.experts.down_proj"] == P("data", "model")
    odd = Plan.tensor_parallel("model").resolve({"moe.experts.up": (6, 16, 32)}, mesh).specs
    assert odd == {"moe.experts.up": P(None, None, "model")}
    alone = {"experts.0.w1.weight": (32, 16), "experts.0.w2.weight": (16, 32)}
    assert Plan.tensor_parallel("model").resolve(alone, mesh).specs == {
        "experts.0.w1.weight": P("model"),
        "experts.0.w2.weight": P(None, "model"),
    }


def test_a_stack_comes_before_larger_axes():
    mesh = jax.make_mesh((8,), ("x",))
    assert Plan({"*": Largest("x", 0)}).spec_for("w", (8, 64), mesh) == P(None, "x")
    assert Plan({"*": Largest("x", 0, stacked=True)}).spec_for("w", (8, 64), mesh) == P("x")
