"""transformers' own continuous batching: its paged cache is sized by the device's memory."""

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.continuous_batching import cache as paged

import isoshard as iso
import isoshard.torch_bridge
from isoshard.torch_bridge.device import paged_cache_memory

FREE = 64 << 20


def test_generate_batch_fits_the_memory_of_a_chip(monkeypatch):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    model = LlamaForCausalLM(config).eval()
    prompts = [[5, 6, 7], [9], [3, 4, 5, 6, 7, 8]]
    options = GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=-1, pad_token_id=0)
    expected = [
        model.generate(torch.tensor([prompt]), generation_config=options)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    caches = []
    build = paged.PagedAttentionCache.__init__

    def building(self, *args, **kwargs):
        build(self, *args, **kwargs)
        caches.append(self)

    monkeypatch.setattr(paged.PagedAttentionCache, "__init__", building)
    monkeypatch.setattr(paged_cache_memory, "fullest_chip", lambda: (FREE, 2 * FREE))
    mesh = iso.make_mesh((4,), ("model",))
    model = iso.shard(model, mesh, iso.Plan.from_hf_tp_plan(model, axis="model"))
    results = model.generate_batch(inputs=prompts, generation_config=options)
    assert [result.generated_tokens for result in results.values()] == expected
    [cache] = caches
    tokens, heads = cache.max_batch_tokens, config.num_attention_heads
    scores = 4 * heads * tokens * (tokens + cache.max_tokens_read)
    assert FREE / 20 < cache.cache_tensor.numel() + scores < FREE
    assert paged.get_device_and_memory_breakdown()[0] == torch.device("cpu")
