"""Families of models: a small one of each trains on one device and on a mesh."""

from __future__ import annotations

from typing import Any

import torch

import isoshard as iso
from tests.ecosystem.case import TOKENS, data, three_steps, whole_numbers

Batch = dict[str, torch.Tensor]
WORDS: Batch = {"input_ids": TOKENS, "labels": TOKENS}
PICTURES: Batch = {"pixel_values": data(2, 3, 32, 32), "labels": torch.tensor([1, 3])}
SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 4, "intermediate_size": 64}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _of_transformers(name: str, head: str, **options: Any) -> torch.nn.Module:
    import transformers

    config = getattr(transformers, f"{name}Config")(**options)
    return getattr(transformers, f"{name}{head}")(config)


def llama() -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {**SIZES, **HEADS, "num_key_value_heads": 2}
    return _of_transformers("Llama", "ForCausalLM", **sizes)


def qwen2() -> torch.nn.Module:
    return _of_transformers("Qwen2", "ForCausalLM", **SIZES, **HEADS, num_key_value_heads=4)


def gemma2() -> torch.nn.Module:
    sizes = {"num_hidden_layers": 2, "num_key_value_heads": 4, "head_dim": 8}
    return _of_transformers("Gemma2", "ForCausalLM", **{**SIZES, **HEADS, **sizes})


def opt() -> torch.nn.Module:
    sizes = {"ffn_dim": 64, "num_attention_heads": 4, "word_embed_proj_dim": 32, "dropout": 0.0}
    return _of_transformers("OPT", "ForCausalLM", **SIZES, **sizes, max_position_embeddings=32)


def distilbert() -> torch.nn.Module:
    sizes = {"vocab_size": 64, "dim": 32, "n_layers": 1, "n_heads": 4, "hidden_dim": 64}
    sizes["max_position_embeddings"] = 32
    return _of_transformers(
        "DistilBert", "ForMaskedLM", **sizes, dropout=0.0, attention_dropout=0.0
    )


def modern_bert() -> torch.nn.Module:
    special = {"num_hidden_layers": 2, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2}
    special |= {"bos_token_id": 1, "eos_token_id": 2}
    return _of_transformers("ModernBert", "ForMaskedLM", **{**SIZES, **HEADS, **special})


def deberta() -> torch.nn.Module:
    sizes = {"relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"]}
    sizes["max_position_embeddings"] = 32
    return _of_transformers("DebertaV2", "ForMaskedLM", **{**SIZES, **HEADS, **NO_DROPOUT, **sizes})


def segformer() -> torch.nn.Module:
    sizes = {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "strides": [4, 2]}
    sizes |= {"hidden_sizes": [16, 32], "num_attention_heads": [2, 4], "mlp_ratios": [2, 2]}
    sizes |= {"patch_sizes": [7, 3], "decoder_hidden_size": 32, "num_labels": 4}
    off = {"classifier_dropout_prob": 0.0, "drop_path_rate": 0.0}
    return _of_transformers("Segformer", "ForSemanticSegmentation", **sizes, **off, **NO_DROPOUT)


def swin() -> torch.nn.Module:
    sizes = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 1]}
    sizes |= {"num_heads": [2, 4], "window_size": 4, "num_labels": 4, "drop_path_rate": 0.0}
    return _of_transformers("Swin", "ForImageClassification", **sizes, **NO_DROPOUT)


def clip() -> torch.nn.Module:
    text = {**SIZES, **HEADS, "projection_dim": 16}
    text |= {"max_position_embeddings": 16, "bos_token_id": 1, "eos_token_id": 2}
    image = {**HEADS, "hidden_size": 32, "num_hidden_layers": 1, "image_size": 32, "patch_size": 16}
    return _of_transformers(
        "CLIP", "Model", text_config=text, vision_config=image, projection_dim=16
    )


def wav2vec2() -> torch.nn.Module:
    sizes = {"conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3)}
    sizes |= {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4}
    sizes |= {"pad_token_id": 0, "ctc_loss_reduction": "mean"}
    names = "hidden_dropout", "activation_dropout", "attention_dropout", "feat_proj_dropout"
    off = dict.fromkeys((*names, "final_dropout", "layerdrop", "mask_time_prob"), 0.0)
    return _of_transformers("Wav2Vec2", "ForCTC", **{**SIZES, **HEADS, **sizes, **off})


def mamba() -> torch.nn.Module:
    return _of_transformers("Mamba", "ForCausalLM", **SIZES, state_size=8)


def mamba2() -> torch.nn.Module:
    sizes = {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 4}
    return _of_transformers("Mamba2", "ForCausalLM", **SIZES, **sizes)


SPEECH: Batch = {"input_values": data(2, 400), "labels": whole_numbers(63, 2, 6, seed=2) + 1}
PAIRS: Batch = {**PICTURES, "input_ids": TOKENS, "return_loss": True}
del PAIRS["labels"]
AREAS: Batch = {**PICTURES, "labels": whole_numbers(4, 2, 32, 32)}


def _loss(model: torch.nn.Module, **batch: Any) -> torch.Tensor:
    return model(**batch).loss


def _of_heads(model: torch.nn.Module) -> iso.Plan:
    return iso.Plan.from_hf_tp_plan(model, axis="model")


for _name, _make, _batch, _options in (
    ("Llama", llama, WORDS, {"on_a_mesh": None}),
    ("Qwen2", qwen2, WORDS, {"plan": _of_heads, "on_a_mesh": None}),
    ("Gemma2", gemma2, WORDS, {"plan": _of_heads}),
    ("OPT", opt, WORDS, {"on_a_mesh": None}),
    ("DistilBERT", distilbert, WORDS, {"on_a_mesh": None}),
    ("ModernBERT", modern_bert, WORDS, {"on_a_mesh": None}),
    ("DeBERTa-v2", deberta, WORDS, {"on_a_mesh": None}),
    ("Mamba", mamba, WORDS, {"on_a_mesh": False}),
    ("Mamba2", mamba2, WORDS, {"on_a_mesh": None}),
    ("SegFormer", segformer, AREAS, {"on_a_mesh": None}),
    ("Swin", swin, PICTURES, {"on_a_mesh": None}),
    ("CLIP", clip, PAIRS, {"on_a_mesh": None}),
    # looks at labels to shape its loss
    ("Wav2Vec2", wav2vec2, SPEECH, {"compiled": False, "on_a_mesh": None}),
):
    three_steps("transformers", _name, _make, _batch, _loss, **_options)


def unet() -> torch.nn.Module:
    """A U-Net of two levels, with attention in the lower one."""
    from diffusers import UNet2DModel

    return UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        block_out_channels=(8, 16),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=4,
    )


def dit() -> torch.nn.Module:
    """A diffusion transformer of one layer."""
    from diffusers import DiTTransformer2DModel

    sizes = {"num_attention_heads": 4, "attention_head_dim": 8, "in_channels": 1, "num_layers": 1}
    sizes |= {"sample_size": 8, "patch_size": 2, "norm_num_groups": 4}
    model = DiTTransformer2DModel(**sizes, dropout=0.0)
    for block in model.transformer_blocks:
        block.norm1.emb.class_embedder.dropout_prob = 0.0
    return model


NOISE = {"x": data(2, 1, 8, 8), "t": torch.tensor([3, 7])}
three_steps(
    "diffusers",
    "UNet2DModel",
    unet,
    NOISE,
    lambda m, x, t: m(x, t).sample.square().mean(),
    on_a_mesh=None,
)
three_steps(
    "diffusers",
    "DiT",
    dit,
    {**NOISE, "kind": torch.tensor([1, 5])},
    lambda m, x, t, kind: m(x, t, class_labels=kind).sample.square().mean(),
    on_a_mesh=None,
)


def decoder() -> torch.nn.Module:
    """A decoder of one layer with rotary positions."""
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    layers = Decoder(dim=32, depth=1, heads=4, rotary_pos_emb=True)
    model = TransformerWrapper(num_tokens=64, max_seq_len=16, attn_layers=layers)
    return AutoregressiveWrapper(model)


three_steps("x-transformers", "Decoder", decoder, {"x": TOKENS}, lambda m, x: m(x), on_a_mesh=None)


def _graph(name: str) -> torch.nn.Module:
    from torch_geometric import nn

    kinds = {"GCN": nn.GCN, "GAT": nn.GAT, "SAGE": nn.GraphSAGE, "GIN": nn.GIN}
    return kinds[name](8, 16, num_layers=2, out_channels=4)


GRAPH = {"x": data(20, 8), "edges": whole_numbers(20, 2, 60, seed=1)}
for _name in ("GCN", "GAT", "SAGE", "GIN"):
    three_steps(
        "torch_geometric",
        _name,
        lambda name=_name: _graph(name),
        GRAPH,
        lambda m, x, edges: m(x, edges).square().mean(),
        on_a_mesh=True if _name == "GAT" else None,
        compiled=_name in ("SAGE", "GIN"),  # the others add self loops, of no fixed number
    )
