"""Models in low precision, sharded: torchao's weights and training."""

import functools

import numpy as np
import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P, Plan

transformers = pytest.importorskip("transformers")

PLAN = Plan(
    {
        "*.[qkv]_proj.*weight": P("model"),
        "*.gate_proj.weight": P("model"),
        "*.up_proj.weight": P("model"),
        "*.o_proj.weight": P(None, "model"),
        "*.down_proj.weight": P(None, "model"),
        "*": None,
    }
)
IDS = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (4, 16)))


def llama(seed=0):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    return transformers.LlamaForCausalLM(config).eval()


def mesh():
    return iso.make_mesh((2, 4), ("data", "model"))


def is_layer(module, name):
    return isinstance(module, torch.nn.Linear) and "lm_head" not in name


def quantized(kind):
    quantization = pytest.importorskip("torchao.quantization")
    int4 = {"weight_dtype": torch.int4}
    groups = quantization.PerGroup(32)
    config = {
        "int8": quantization.Int8WeightOnlyConfig,
        "float8": quantization.Float8WeightOnlyConfig,
        "int4": functools.partial(quantization.IntxWeightOnlyConfig, **int4, granularity=groups),
        "int8 dynamic": quantization.Int8DynamicActivationInt8WeightConfig,
    }[kind]
    return functools.partial(quantization.quantize_, config=config(), filter_fn=is_layer)


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [("int8", 1e-5), ("float8", 1e-5), ("int4", 1e-5), ("int8 dynamic", 0.05)],
)
@pytest.mark.parametrize("first", ["quantize", "shard"])
def test_weights_of_torchao(kind, tolerance, first):
    quantize, model, plain = quantized(kind), llama(), llama()
    quantize(plain)
    if first == "quantize":
        quantize(model)
        iso.shard(model, mesh(), PLAN)
    else:  # scales may differ in the last bit, so what is at a tie by a step
        iso.shard(model, mesh(), PLAN)
        quantize(model)
        tolerance = 0.2 if kind == "int4" else 0.05
    up, down = (
        getattr(model.model.layers[0].mlp, f"{name}_proj").weight for name in ("up", "down")
    )
    assert iso.sharding_of(up).spec == P("model")
    assert iso.sharding_of(down).spec == P(None, "model")
    array = iso.to_jax(up)["qdata"]
    assert array.itemsize == 1 and array.addressable_shards[0].data.size == array.size // 4
    step = xs.compile(lambda ids: model(input_ids=ids).logits)
    with torch.no_grad():
        want = plain(input_ids=IDS).logits
        for _ in range(2):
            got = step(iso.shard(IDS, mesh(), P("data"))).cpu()
    assert (got - want).abs().max() <= tolerance * want.abs().max()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "tensorwise, weights by float8"])
def test_float8_training_of_torchao(recipe):
    float8 = pytest.importorskip("torchao.float8")
    by_float8 = recipe.endswith("float8")
    config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    if not by_float8:
        config = float8.Float8LinearConfig.from_recipe_name(recipe)

    def losses(on_mesh):
        model = llama().train()
        model = model.bfloat16() if recipe == "rowwise" else model
        float8.convert_to_float8_training(model, config=config, module_filter_fn=is_layer)
        if on_mesh:
            iso.shard(model, mesh(), PLAN)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(ids):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step = xs.compile(step) if on_mesh else step
        ids = iso.shard(IDS, mesh(), P("data")) if on_mesh else IDS
        return [step(ids).item() for _ in range(3)], model.model.layers[0].mlp.up_proj.weight

    (want, _), (got, weight) = losses(False), losses(True)
    assert iso.sharding_of(weight).spec == P("model")
    assert (type(weight).__name__ == "WeightWithDynamicFloat8CastTensor") == by_float8
    np.testing.assert_allclose(got, want, rtol=2e-3)
    assert got[-1] < got[0]
