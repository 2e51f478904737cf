"""Tiny random-weight models of eight `transformers` families, with a batch for each.

Nothing is downloaded: every model is made from a configuration. Head counts, widths and the
vocabulary divide by the four devices of the mesh axis "model".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import transformers

from isoshard import P, Plan
from isoshard.core.plan import Conv, Linear

BATCH, LENGTH, VOCAB, WIDTH = 4, 8, 128, 32

Batch = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Family:
    """One model family.

    Attributes:
        model: makes the model, float32, on the CPU, without dropout unless asked for.
        batch: makes the keyword arguments of one step, labels included.
        rules: the tensor-parallel layout over the mesh axis "model"; None where the model brings a
            plan of its own.
    """

    model: Callable[..., torch.nn.Module]
    batch: Callable[[int], Batch]
    rules: dict[str, Any] | None = None

    def plan(self, module: torch.nn.Module) -> Plan:
        """The layout of `module`; what has no rule is replicated."""
        if self.rules is None:
            return Plan.from_hf_tp_plan(module, axis="model")
        return Plan(self.rules, default=P())


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tokens(seed: int, length: int = LENGTH) -> torch.Tensor:
    """Token numbers, 3 and up: no padding, start or end tokens by accident."""
    return torch.randint(3, VOCAB, (BATCH, length), generator=_generator(seed))


def numbers(seed: int, *shape: int) -> torch.Tensor:
    """Normal random numbers."""
    return torch.randn(shape, generator=_generator(seed))


DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def gpt2(dropout: float = 0.0, layers: int = 2) -> torch.nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_positions=64,
        n_embd=WIDTH,
        n_layer=layers,
        n_head=4,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.GPT2LMHeadModel(config)


def llama(**changes: Any) -> torch.nn.Module:
    config = transformers.LlamaConfig(**{**DECODER, **changes})
    return transformers.LlamaForCausalLM(config)


def mixtral(**changes: Any) -> torch.nn.Module:
    sizes = {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2}
    config = transformers.MixtralConfig(**{**sizes, **changes})
    return transformers.MixtralForCausalLM(config)


def bert(layers: int = 2) -> torch.nn.Module:
    config = transformers.BertConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForMaskedLM(config)


def vit(layers: int = 2) -> torch.nn.Module:
    config = transformers.ViTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=16,
        patch_size=8,
        num_labels=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.ViTForImageClassification(config)


def resnet() -> torch.nn.Module:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", num_labels=8
    )
    return transformers.ResNetForImageClassification(config)


def t5(**changes: Any) -> torch.nn.Module:
    sizes = {
        "vocab_size": VOCAB,
        "d_model": WIDTH,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 1,
        "num_decoder_layers": 2,
        "num_heads": 4,
        "dropout_rate": 0.0,
        "decoder_start_token_id": 0,
    }
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**{**sizes, **changes}))


def whisper() -> torch.nn.Module:
    config = transformers.WhisperConfig(
        vocab_size=VOCAB,
        num_mel_bins=8,
        d_model=WIDTH,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=16,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        dropout=0.0,
    )
    return transformers.WhisperForConditionalGeneration(config)


def language(seed: int) -> Batch:
    """Causal language modelling: the labels are the tokens, which the model shifts."""
    ids = tokens(seed)
    return {"input_ids": ids, "labels": ids.clone()}


def padding(seed: int) -> torch.Tensor:
    """The mask of a batch whose first sequence is shorter."""
    mask = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    mask[0, LENGTH - 1 - seed % 3 :] = False
    return mask


def masked(seed: int) -> Batch:
    """Masked language modelling with padding: a quarter of the tokens count.

    The mask has the four axes that attention broadcasts, for one of two axes would be read on the
    host in each step (`transformers` looks whether anything is masked at all).
    """
    ids = tokens(seed)
    chosen = torch.rand(ids.shape, generator=_generator(seed)) < 0.25
    chosen[:, 1] = True
    return {
        "input_ids": ids.masked_fill(chosen, 4),
        "attention_mask": padding(seed)[:, None, None, :],
        "labels": ids.masked_fill(~chosen, -100),
    }


def images(seed: int, size: int = 16) -> Batch:
    return {
        "pixel_values": numbers(seed, BATCH, 3, size, size),
        "labels": torch.randint(8, (BATCH,), generator=_generator(seed)),
    }


def pairs(seed: int) -> Batch:
    return {"input_ids": tokens(seed), "labels": tokens(seed + 100, 6)}


def speech(seed: int) -> Batch:
    return {"input_features": numbers(seed, BATCH, 8, 32), "labels": tokens(seed, 6)}


_OUT, _INTO = Linear(out="model"), Linear(into="model")
FAMILIES = {
    "gpt2": Family(
        gpt2,
        language,
        {  # GPT-2 keeps its layers as Conv1D: weight[in, out]
            "*.c_attn.weight": P(None, "model"),
            "*.c_attn.bias": P("model"),
            "*.c_fc.weight": P(None, "model"),
            "*.c_fc.bias": P("model"),
            "*.c_proj.weight": P("model"),
            "*.wte.weight": P("model"),
        },
    ),
    "llama": Family(llama, language),
    "bert": Family(
        bert,
        masked,
        {
            "*.self.*": _OUT,
            "*.attention.output.dense.weight": _INTO,
            "*.intermediate.dense.*": _OUT,
            "*.layer.?.output.dense.weight": _INTO,
            "*.word_embeddings.weight": P("model"),
        },
    ),
    "vit": Family(
        vit,
        images,
        {
            "*.[qkv]_proj.*": _OUT,
            "*.o_proj.weight": _INTO,
            "*.fc1.*": _OUT,
            "*.fc2.weight": _INTO,
            "*.projection.*": Conv(out="model"),
        },
    ),
    "resnet": Family(
        resnet,
        lambda seed: images(seed, 32),
        {
            "*.convolution.weight": Conv(out="model"),
            "*.normalization.num_batches_tracked": None,
            "*.normalization.*": P("model"),
            "classifier.1.weight": _INTO,
        },
    ),
    "t5": Family(
        t5,
        pairs,
        {
            "*.[qkv].weight": _OUT,
            "*.o.weight": _INTO,
            "*.wi.weight": _OUT,
            "*.wo.weight": _INTO,
            "shared.weight": P("model"),
        },
    ),
    "mixtral": Family(mixtral, language),
    "whisper": Family(
        whisper,
        speech,
        {
            "*.[qkv]_proj.*": _OUT,
            "*.out_proj.weight": _INTO,
            "*.fc1.*": _OUT,
            "*.fc2.weight": _INTO,
            "*.embed_tokens.weight": P("model"),
        },
    ),
}


def build(name: str, **changes: Any) -> torch.nn.Module:
    """The model of a family in training mode, the same weights at every call."""
    torch.manual_seed(0)
    return FAMILIES[name].model(**changes).train()


def small(name: str) -> torch.nn.Module:
    """The same with one layer."""
    layers = {"gpt2": "layers", "bert": "layers", "vit": "layers", "t5": "num_decoder_layers"}
    layers |= {"llama": "num_hidden_layers", "mixtral": "num_hidden_layers"}
    return build(name, **({layers[name]: 1} if name in layers else {}))
