"""Plans that models of `transformers` bring along, on the mesh."""

from __future__ import annotations

import pytest
import torch

import isoshard as iso
from isoshard import P, Plan, PlanError, make_mesh
from tests.torch_bridge.models.families import build, language

# One layer of each golden table; the second has the same.
LLAMA = {
    "model.embed_tokens.weight": P("model"),
    "model.layers.0.self_attn.q_proj.weight": P("model"),
    "model.layers.0.self_attn.k_proj.weight": P("model"),
    "model.layers.0.self_attn.v_proj.weight": P("model"),
    "model.layers.0.self_attn.o_proj.weight": P(None, "model"),
    "model.layers.0.mlp.gate_proj.weight": P("model"),
    "model.layers.0.mlp.up_proj.weight": P("model"),
    "model.layers.0.mlp.down_proj.weight": P(None, "model"),
    "model.layers.0.input_layernorm.weight": P(),
    "model.layers.0.post_attention_layernorm.weight": P(),
    "model.norm.weight": P(),
    "lm_head.weight": P("model"),
}
MIXTRAL = {
    **{name: spec for name, spec in LLAMA.items() if ".mlp." not in name},
    "model.layers.0.mlp.gate.weight": P(),
    "model.layers.0.mlp.experts.gate_up_proj": P(None, "model"),
    "model.layers.0.mlp.experts.down_proj": P(None, None, "model"),
}


@pytest.fixture(scope="module")
def mesh():
    return make_mesh((2, 4), ("data", "model"))


def specs(plan: Plan, module: torch.nn.Module, mesh) -> dict[str, P]:
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    return plan.resolve(shapes, mesh).specs


@pytest.mark.parametrize(("name", "golden"), [("llama", LLAMA), ("mixtral", MIXTRAL)])
def test_the_table_of_specs(name, golden, mesh):
    module = build(name)
    second = {key.replace("layers.0", "layers.1"): spec for key, spec in golden.items()}
    assert specs(Plan.from_hf_tp_plan(module), module, mesh) == {**golden, **second}


def test_each_device_holds_less(mesh):
    module = build("mixtral")
    whole = sum(p.nbytes for p in module.parameters())
    module = iso.shard(module, mesh, Plan.from_hf_tp_plan(module))
    for device in range(mesh.size):
        held = sum(iso.local_shards(p.detach())[device].data.nbytes for p in module.parameters())
        assert held < 0.3 * whole


def test_the_plan_of_a_configuration_is_that_of_the_base_model(mesh):
    module = build("llama")
    base = Plan.from_hf_tp_plan(module.config, prefix="model.")
    found, whole = specs(base, module, mesh), specs(Plan.from_hf_tp_plan(module), module, mesh)
    beyond = {"model.embed_tokens.weight", "lm_head.weight"}
    assert {name for name in found if found[name] != whole[name]} == beyond


def test_models_without_a_plan_are_refused():
    with pytest.raises(PlanError, match="GPT2LMHeadModel carries no tensor-parallel plan"):
        Plan.from_hf_tp_plan(build("gpt2"))


def test_experts_spread_over_devices_give_the_same_loss(mesh):
    module = build("mixtral", num_hidden_layers=1).eval()
    plan = Plan.from_hf_tp_plan({**module.tp_plan, **module.ep_plan})
    experts = "model.layers.0.mlp.experts.down_proj"
    assert specs(plan, module, mesh)[experts] == P("model")
    with torch.no_grad():
        want = module(**language(0)).loss
        module = iso.shard(module, mesh, plan)
        batch = {key: iso.shard(x, mesh, P("data")) for key, x in language(0).items()}
        got = module(**batch).loss
    torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-5)
    assert module.get_parameter(experts).local_shards[0].data.shape[0] == 1


def test_saved_as_pretrained_and_loaded_without_the_device(tmp_path, mesh):
    module = build("llama")
    tokens = torch.arange(12).reshape(2, 6)
    want = module(tokens).logits
    there = type(module)(module.config)
    there.load_state_dict(module.state_dict())
    there = iso.shard(there, mesh, Plan.from_hf_tp_plan(module))
    there.save_pretrained(tmp_path)
    again = type(module).from_pretrained(tmp_path)
    torch.testing.assert_close(again(tokens).logits, want, atol=0, rtol=0)
