"""Loops of a user's own over `StaticCache`, with the step under `xs.compile`."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P
from isoshard.core.runtime import metrics
from isoshard.torch_bridge.layout.marks import placed

SIZE, PROMPT, NEW = 32, 8, 5


def model_of():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    return LlamaForCausalLM(config).eval()


def step_of(model):
    def step(tokens, positions, cache):
        with torch.no_grad():
            out = model(
                input_ids=tokens, position_ids=positions, past_key_values=cache, use_cache=True
            )
        return out.logits[:, -1].argmax(-1, keepdim=True)

    return step


def prompt_of(seed):
    return torch.randint(0, 128, (2, PROMPT), generator=torch.Generator().manual_seed(seed))


class Loop:
    """A prompt and its cache."""

    def __init__(self, step, model, ids):
        self.step, self.device = step, ids.device
        self.cache = StaticCache(config=model.config, max_cache_len=SIZE)
        self.position = torch.tensor([[PROMPT]], device=self.device)
        self.tokens = [step(ids, torch.arange(PROMPT, device=self.device)[None], self.cache)]

    def next(self):
        self.tokens.append(self.step(self.tokens[-1], self.position, self.cache))
        self.position = self.position + 1
        return self

    def run(self):
        for _ in range(NEW):
            self.next()
        return torch.cat(self.tokens, 1).cpu()


@pytest.fixture
def expected():
    model = model_of()
    return [Loop(step_of(model), model, prompt_of(seed)).run() for seed in range(4)]


def counted():
    counts = metrics.counters()
    return counts["captures"], counts["compilations"], counts["calls_without_replay"]


@pytest.mark.parametrize("on_mesh", [False, True], ids=["a device", "a mesh"])
def test_each_prompt_has_a_cache_of_its_own_and_all_have_one_program(expected, mesh, on_mesh):
    model = model_of()
    if on_mesh:
        plan = iso.Plan.from_hf_tp_plan(model, axis="y")
        model = iso.shard(model, mesh, plan)
    else:
        model = model.to("jax")
    step = xs.compile(step_of(model))

    def loop(seed):
        ids = prompt_of(seed)
        return Loop(step, model, iso.shard(ids, mesh, P("x")) if on_mesh else ids.to("jax"))

    for seeds in ((0, 1), (1, 0), (2, 3)):
        metrics.reset()
        loops = [loop(seed) for seed in seeds]
        for _ in range(NEW):  # in turns
            loops = [each.next() for each in loops]
        counts = counted()
        for each, seed in zip(loops, seeds, strict=True):
            assert torch.equal(torch.cat(each.tokens, 1).cpu(), expected[seed])
            assert type(each.cache) is StaticCache
            assert int(each.cache.get_seq_length()) == PROMPT + NEW
            if on_mesh:
                assert placed(each.cache.layers[0].keys).mesh.shape == {"x": 2, "y": 4}
    assert counts == (0, 0, 0)


def test_a_cache_that_is_initialized_early_is_captured_once(expected):
    model = model_of().to("jax")
    step = xs.compile(step_of(model))
    for seed in range(2):
        metrics.reset()
        cache = StaticCache(config=model.config, max_cache_len=SIZE)
        cache.early_initialization(2, 4, 8, torch.float32, model.device)
        ids = prompt_of(seed).to("jax")
        token = step(ids, torch.arange(PROMPT, device="jax")[None], cache)
        assert torch.equal(token.cpu(), expected[seed][:, :1])
        assert counted()[0] == (seed == 0)


def test_a_step_that_fails_leaves_the_cache_as_it_was():
    model = model_of().to("jax")
    inner = step_of(model)

    def step(tokens, positions, cache, fails=False):
        token = inner(tokens, positions, cache)
        if fails:
            raise ValueError("stop")
        return token

    step = xs.compile(step)
    loop = Loop(step, model, prompt_of(0).to("jax")).next()
    keys, length = loop.cache.layers[0].keys.cpu(), int(loop.cache.get_seq_length())
    with pytest.raises(ValueError, match="stop"):
        step(loop.tokens[-1], loop.position, loop.cache, fails=True)
    assert torch.equal(loop.cache.layers[0].keys.cpu(), keys)
    assert int(loop.cache.get_seq_length()) == length


def test_the_result_has_the_callers_cache():
    model = model_of().to("jax")

    @xs.compile
    def step(tokens, cache):
        with torch.no_grad():
            out = model(input_ids=tokens, past_key_values=cache, use_cache=True)
        return {"logits": out.logits, "cache": out.past_key_values}

    for seed in range(3):
        cache = StaticCache(config=model.config, max_cache_len=SIZE)
        assert step(prompt_of(seed).to("jax"), cache)["cache"] is cache
        assert int(cache.get_seq_length()) == PROMPT


def test_a_number_that_a_step_reads_from_the_cache_is_not_an_old_one():
    step = xs.compile(lambda x, cache: x * cache.factor + cache.layers[0].keys.sum())
    x = torch.ones(2, device="jax")
    for factor in (2.0, 3.0, 2.0):
        cache = StaticCache(config=model_of().config, max_cache_len=SIZE)
        cache.early_initialization(2, 4, 8, torch.float32, x.device)
        cache.factor = factor
        assert step(x, cache).tolist() == [factor, factor]
