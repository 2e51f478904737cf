"""An engine's tokens are those of CPU torch, one request at a time without a cache."""

import random
import re
import threading

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard.torch_bridge.serving import Engine, QueueFullError, SamplingParams, SlotCache

WORDS = 128
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
}


def _model(kind=LlamaForCausalLM, config=LlamaConfig, **options):
    torch.manual_seed(0)
    model = kind(config(**{**SIZES, **options})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)  # logits that differ
    return model


def _reference(model, prompt, new):
    ids = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(new):
            logits = model(input_ids=ids, use_cache=False).logits[:, -1]
            ids = torch.cat((ids, logits.argmax(-1, keepdim=True)), dim=1)
    return ids[0, len(prompt) :].tolist()


def _requests(count, longest):
    draw = random.Random(0)
    return [
        ([draw.randrange(WORDS) for _ in range(draw.randint(1, longest))], draw.randint(1, 12))
        for _ in range(count)
    ]


def _serve(engine, requests):
    served = [engine.add_request(p, SamplingParams(max_tokens=n)) for p, n in requests]
    while engine.step():
        pass
    return served


def test_64_requests_of_mixed_lengths_in_8_slots():
    model = _model()
    requests = _requests(64, longest=40)
    expected = [_reference(model, prompt, new) for prompt, new in requests]
    mesh = iso.make_mesh((2, 4), ("data", "model"))
    model = iso.shard(model, mesh, iso.Plan.from_hf_tp_plan(model, axis="model"))
    engine = Engine(model, slots=8, max_length=64, buckets=(8, 16, 40))
    before = iso.metrics.counters()["compilations"]
    served = _serve(engine, requests)
    assert [request.tokens for request in served] == expected
    assert {request.finish_reason for request in served} == {"length"}
    compilations = iso.metrics.counters()["compilations"] - before
    assert compilations <= len(engine.buckets) + 1, iso.metrics.report()

    keys = engine.cache.layers[0].keys
    assert iso.sharding_of(keys).spec == iso.P("data", "model")
    text = xs.program_text(engine._decode)
    rows = keys.shape[2]
    assert f",{rows},8]" in text  # a device has the cache of half of the slots and one head
    whole = re.compile(rf"f32\[8,\d,{rows},8\]|f32\[\d,4,{rows},8\]")
    assert not whole.search(text), "the program gathers the cache"


FAMILIES = {
    "sliding": (MistralForCausalLM, MistralConfig, {"sliding_window": 8}),
    "mixed": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {
            "sliding_window": 8,
            "head_dim": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "eager": (LlamaForCausalLM, LlamaConfig, {"attn_implementation": "eager"}),
    "experts": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    ),
    "absolute": (GPT2LMHeadModel, GPT2Config, {"n_embd": 64, "n_layer": 2, "n_head": 4}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_kinds_of_attention(family):
    kind, config, options = FAMILIES[family]
    model = _model(kind, config, **options)
    requests = _requests(6, longest=20)
    expected = [_reference(model, prompt, new) for prompt, new in requests]
    engine = Engine(model.to("jax"), slots=3, max_length=36, buckets=(20,))
    assert [request.tokens for request in _serve(engine, requests)] == expected


@pytest.fixture(scope="module")
def engine():
    """One for all tests of requests; compiled once."""
    model = _model(num_hidden_layers=1).to("jax")
    engine = Engine(model, slots=2, max_length=24, buckets=(8,), max_waiting=3)
    engine.warm_up()
    return engine


def test_a_request_draws_its_own_tokens_in_any_company(engine):
    draws = SamplingParams(max_tokens=10, temperature=1.5, top_p=0.9, seed=2**32 - 1)
    alone = engine.add_request([1, 2, 3], draws)
    while engine.step():
        pass
    engine.add_request([4, 5], SamplingParams(max_tokens=3, temperature=2.0, seed=1))
    engine.add_request([6], SamplingParams(max_tokens=15))
    late = engine.add_request([1, 2, 3], draws)  # waits for the first, takes its slot
    while engine.step():
        pass
    assert late.tokens == alone.tokens
    other = engine.add_request([1, 2, 3], SamplingParams(10, 1.5, 0.9, seed=8))
    greedy = engine.add_request([1, 2, 3], SamplingParams(10, 1.5, top_k=1))
    while engine.step():
        pass
    assert other.tokens != alone.tokens
    assert greedy.tokens == _reference(_model(num_hidden_layers=1), [1, 2, 3], 10)


def test_stop_tokens_and_the_end_of_the_cache(engine):
    expected = _reference(_model(num_hidden_layers=1), [9, 8], 22)
    at = next(i for i, token in enumerate(expected) if token not in expected[:i] and i > 2)
    stopped = engine.add_request([9, 8], SamplingParams(22, stop_token_ids=(expected[at],)))
    filled = engine.add_request([9, 8], SamplingParams(max_tokens=1000))
    while engine.step():
        pass
    assert (stopped.tokens, stopped.finish_reason) == (expected[:at], "stop")
    assert (filled.tokens, filled.finish_reason) == (expected, "length")


def test_cancelling_loses_no_other_request(engine):
    before = iso.metrics.counters()["compilations"]
    running, kept, waiting, last = (
        engine.add_request([n, n + 1], SamplingParams(max_tokens=12)) if n < 3 else None
        for n in range(4)
    )
    engine.step()
    last = engine.add_request([3, 4], SamplingParams(max_tokens=12))
    running.cancel()
    waiting.cancel()
    while engine.step():
        pass
    assert running.finish_reason == waiting.finish_reason == "cancelled"
    assert not waiting.tokens and len(running.tokens) < 12
    model = _model(num_hidden_layers=1)
    assert kept.tokens == _reference(model, [1, 2], 12)
    assert last.tokens == _reference(model, [3, 4], 12)
    assert iso.metrics.counters()["compilations"] == before


def test_what_is_refused(engine):
    for n in range(3):
        engine.add_request([n])
    with pytest.raises(QueueFullError, match="3 requests wait for a slot, which is max_waiting"):
        engine.add_request([5])
    while engine.step():
        pass
    with pytest.raises(ValueError, match=r"has 1 to 8 tokens .max_length=24, .*not 9"):
        engine.add_request(range(9))
    with pytest.raises(ValueError, match="token id 128 of the prompt is not an integer from 0"):
        engine.add_request([128])
    with pytest.raises(ValueError, match=r"top_p=0 is not above 0.*; seed=-1 is not from 0"):
        SamplingParams(top_p=0, seed=-1)
    with pytest.raises(iso.errors.DeviceError, match="this one is on cpu"):
        Engine(_model())
    with pytest.raises(ValueError, match=r"call model.eval\(\)"):
        Engine(_model(num_hidden_layers=1).to("jax").train())
    with pytest.raises(ValueError, match="buckets are lengths from 1 to max_length=16"):
        Engine(_model(num_hidden_layers=1).to("jax"), max_length=16, buckets=(32,))
    mamba = {"num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 1}
    with pytest.raises(ValueError, match="a SlotCache holds full, sliding and chunked attention"):
        SlotCache(_model(Mamba2ForCausalLM, Mamba2Config, **mamba).to("jax"), 2, 8)


def test_an_engine_in_its_own_thread():
    model = _model(num_hidden_layers=1)
    engine = Engine(_model(num_hidden_layers=1).to("jax"), slots=2, max_length=24, buckets=(8,))
    seen = []
    with engine:
        clients = [
            threading.Thread(target=lambda n=n: seen.append((n, engine.add_request([n]).wait(300))))
            for n in range(5)
        ]
        for client in clients:
            client.start()
        with pytest.raises(RuntimeError, match="runs in its own thread"):
            engine.step()
        for client in clients:
            client.join()
    assert sorted(seen) == [(n, _reference(model, [n], 16)) for n in range(5)]
    with pytest.raises(RuntimeError, match="closed"):
        engine.add_request([1])

    failing = Engine(_model(num_hidden_layers=1).to("jax"), slots=1, max_length=24, buckets=(8,))
    failing._decode = None
    running, waiting = failing.add_request([1]), failing.add_request([2])
    with failing:
        for request in (running, waiting):
            with pytest.raises(RuntimeError, match="the engine has failed: 'NoneType'"):
                request.wait(300)
        assert (running.finish_reason, waiting.finish_reason) == ("error", "error")
        with pytest.raises(RuntimeError, match="the engine has failed"):
            failing.add_request([1])
