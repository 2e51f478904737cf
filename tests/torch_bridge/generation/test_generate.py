"""`generate()` as people write it: the tokens of the CPU, two programs, and none in later calls."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import transformers
from transformers.generation.streamers import BaseStreamer

import isoshard as iso
import isoshard.torch_bridge
from isoshard import P
from isoshard.core.runtime import metrics
from isoshard.torch_bridge.generation.full_cache import FullCache
from tests.torch_bridge.models.families import build

ROWS, LENGTH, NEW, VOCAB = 4, 10, 6, 128
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
    "eos_token_id": None,
}
IDS = torch.randint(3, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS).index_put(
    (torch.tensor([0, 0, 2]), torch.tensor([0, 1, 0])), torch.tensor(0)
)


def _mesh():
    return iso.make_mesh((2, 4), ("data", "model"))


def _model(kind: str = "Llama", seed: int = 0, **changes) -> torch.nn.Module:
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **changes})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.dim() > 1 else 1)  # logits that differ
    return model


def _sharded(model: torch.nn.Module) -> torch.nn.Module:
    plan = iso.Plan.from_hf_tp_plan(model, axis="model")
    return iso.shard(copy.deepcopy(model), _mesh(), plan)


@functools.cache
def models():
    model = _model()
    return model, _sharded(model)


@pytest.fixture(scope="module", autouse=True)
def _programs_end_with_this_module():
    yield
    models.cache_clear()


def _generated(model, ids=IDS, **options):
    torch.manual_seed(5)
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, **options}
    return model.generate(ids, **options)


@pytest.fixture
def warm():
    """The programs of prompts up to 32 tokens, for four rows."""
    _generated(models()[1])


def test_two_programs_and_none_in_later_calls(counted):
    model, sharded = _model(seed=1), _sharded(_model(seed=1))
    assert torch.equal(_generated(sharded), _generated(model))
    assert counted("compilations") == counted("captures") == 2, metrics.report()
    assert counted("executions") == NEW
    assert torch.equal(
        _generated(sharded, IDS + 1 - IDS // 127), _generated(model, IDS + 1 - IDS // 127)
    )
    assert counted("compilations") == counted("captures") == 2


CASES = {
    "another length": {"ids": IDS[:, :7]},
    "three rows": {"ids": IDS[:3]},
    "padding": {"attention_mask": MASK, "ids": IDS * MASK},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20},
    "end of sequence": {"eos_token_id": list(range(0, VOCAB, 4))},
    "processors": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 3},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("where", ["cpu", "jax", "split"])
def test_tokens_are_those_of_the_cpu(case, where, warm, counted):
    model, sharded = models()
    options = dict(CASES[case])
    ids = options.pop("ids", IDS)
    expected = _generated(model, ids, **options)
    if where != "cpu":
        ids = ids.to("jax")
        options = {n: v.to("jax") if torch.is_tensor(v) else v for n, v in options.items()}
    if where == "split" and len(ids) == ROWS:
        ids = iso.shard(ids, _mesh(), P("data"))
    actual = _generated(sharded, ids, **options)
    assert actual.device.type == ("cpu" if where == "cpu" else "jax")
    assert torch.equal(actual.cpu(), expected)
    assert counted("compilations") == counted("captures") == 0, metrics.report()


@pytest.mark.parametrize("kind", ["Mistral", "Qwen3Moe"])
def test_families(kind, counted):
    changes = {"Mistral": {"sliding_window": 5}}.get(
        kind,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 8},
    )
    model = _model(kind, **changes)
    assert torch.equal(
        _generated(_sharded(model), attention_mask=MASK), _generated(model, attention_mask=MASK)
    )
    assert counted("compilations") == 2


def test_scores_and_a_cache_for_the_caller(warm, counted):
    model, sharded = models()
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    expected, actual = _generated(model, **options), _generated(sharded, **options)
    assert torch.equal(actual.sequences, expected.sequences)
    for name in ("scores", "logits"):
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-4, atol=1e-4)
    assert isinstance(actual.past_key_values, FullCache)
    assert actual.past_key_values.get_seq_length() == LENGTH + NEW - 1
    _generated(sharded, IDS.flip(0))  # does not write to the caller's cache
    ids = torch.cat([actual.sequences, IDS[:, :3]], dim=1)
    caches = expected.past_key_values, actual.past_key_values
    counts = counted("compilations"), counted("captures")
    assert counts == (0, 0)
    turns = [
        _generated(m, ids, past_key_values=cache, max_new_tokens=3)
        for m, cache in zip((model, sharded), caches, strict=True)
    ]
    assert torch.equal(turns[1], turns[0])
    assert caches[1].get_seq_length() == caches[0].get_seq_length()


def test_a_cache_of_ended_rows_holds_no_token_after_the_end(warm):
    model, sharded = models()
    ended = _generated(model)[:1, LENGTH + 1].item()
    options = {"return_dict_in_generate": True, "eos_token_id": ended}
    expected, actual = (_generated(m, IDS[:1], **options) for m in (model, sharded))
    assert torch.equal(actual.sequences, expected.sequences)
    lengths = [int(result.past_key_values.get_seq_length()) for result in (expected, actual)]
    assert lengths[1] == lengths[0] < LENGTH + NEW - 1


def test_beams(counted):
    model, sharded = _model(num_hidden_layers=1), _sharded(_model(num_hidden_layers=1))
    assert torch.equal(_generated(sharded, num_beams=3), _generated(model, num_beams=3))
    assert counted("compilations") == counted("captures") == 2, metrics.report()
    ids = IDS[:, 1:].to("jax")
    assert torch.equal(
        _generated(sharded, ids, num_beams=3).cpu(), _generated(model, ids.cpu(), num_beams=3)
    )
    assert counted("compilations") == counted("captures") == 2
    assert counted("executions") == 2 * NEW


# transformers' loop makes the inputs of the draft on the device, a small program for each length.
@pytest.mark.filterwarnings("ignore::isoshard.RecompilationWarning")
def test_assisted(counted):
    draft = _model(num_hidden_layers=1, seed=2)
    model, sharded = models()
    drafts = _sharded(draft)
    expected = _generated(model, IDS[:1], assistant_model=draft)
    counts = []
    for _ in range(3):
        assert torch.equal(_generated(sharded, IDS[:1], assistant_model=drafts), expected)
        counts.append((counted("compilations"), counted("captures")))
    assert counts[2] == counts[1]
    looked_up = _generated(sharded, IDS[:1], prompt_lookup_num_tokens=2)
    assert torch.equal(looked_up, _generated(model, IDS[:1], prompt_lookup_num_tokens=2))


class _Recorded(BaseStreamer):
    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, value):
        assert value.device.type == "cpu"
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended = True


def test_streamers_and_stopping_criteria(warm, counted):
    _, sharded = models()
    tokens = _generated(sharded)
    streamer = _Recorded()
    ids = IDS[:1].repeat(ROWS, 1)[:1]
    actual = _generated(models()[1], ids, streamer=streamer)
    assert streamer.ended and streamer.tokens == actual.flatten().tolist()

    def after_two(input_ids, scores, **_):
        return torch.full((len(input_ids),), input_ids.shape[1] >= LENGTH + 2)

    criteria = transformers.StoppingCriteriaList([after_two])
    assert torch.equal(_generated(sharded, stopping_criteria=criteria), tokens[:, : LENGTH + 2])


def test_what_another_generation_left_in_the_cache_does_not_matter(warm):
    model, sharded = models()
    with torch.no_grad():
        before = sharded.model.norm.weight.clone()
        sharded.model.layers[0].self_attn.v_proj.weight.mul_(float("nan"))
        _generated(sharded)
        sharded.model.layers[0].self_attn.v_proj.weight.copy_(
            model.model.layers[0].self_attn.v_proj.weight.to("jax")
        )
    assert torch.equal(before.cpu(), model.model.norm.weight)
    assert torch.equal(_generated(sharded), _generated(model))


def test_changed_weights_and_modes_are_seen(warm):
    model, sharded = _model(), _sharded(_model())
    first = _generated(sharded)
    for m in (model, sharded):
        with torch.no_grad():
            m.lm_head.weight.copy_(m.lm_head.weight.roll(1, 0))
        m.model.layers = m.model.layers[:1]
        m.config.num_hidden_layers = 1
    assert torch.equal(_generated(sharded), _generated(model))
    assert not torch.equal(_generated(sharded), first)


@pytest.mark.parametrize("off", [{"disable_compile": True}, {"cache_implementation": "dynamic"}])
def test_it_can_be_turned_off(off, counted):
    model, sharded = models()
    expected = _generated(model, max_new_tokens=2)
    assert torch.equal(_generated(sharded, max_new_tokens=2, **off), expected)
    assert counted("captures") == 0


def test_copies_of_a_model_have_no_programs(warm):
    _, sharded = models()
    twin = copy.deepcopy(sharded)
    assert vars(sharded)["_isoshard_decoders"]._kept and not vars(twin)["_isoshard_decoders"]._kept
    assert torch.equal(_generated(twin), _generated(sharded))


def test_encoder_decoders_take_their_prompt_from_the_cpu(counted):
    torch.manual_seed(0)
    model = build("t5", num_decoder_layers=1).eval()
    expected = _generated(model)
    model = model.to("jax")
    counts = []
    for _ in range(3):
        assert torch.equal(_generated(model), expected)
        counts.append(counted("compilations"))
    assert counts[0] <= 5, metrics.report()  # encoder, first token, other tokens, and masks
    assert counts[2] == counts[1]
    with torch.no_grad():
        states = model.get_encoder()(input_ids=IDS.to("jax"))
    assert torch.equal(_generated(model, encoder_outputs=states), expected)
