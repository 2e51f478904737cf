"""`isoshard plan --hf`: steps of models by their configuration alone."""

import json

import pytest
import torch
import transformers

from isoshard import Plan, planner
from isoshard.cli import main
from isoshard.core.installation import install_command
from isoshard.planner.cli.plan_models import model_target
from tests.planner.reports.sample_reports import fitting

SMALL = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
LLAMA = {"intermediate_size": 128, "vocab_size": 1000, **SMALL}


@pytest.fixture
def saved(tmp_path):
    """Write a configuration."""

    def save(config):
        path = tmp_path / "config.json"
        config.to_json_file(path)
        return str(path)

    return save


def target(path, **options):
    return model_target(path, **{"batch": 4, "sequence": None, "dtype": None} | options)


def test_a_language_model(saved):
    config = transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"], max_position_embeddings=512, dtype="bfloat16", **LLAMA
    )
    found = target(saved(config))
    [batch] = found.args
    assert found.name == found.step.__name__ == "LlamaForCausalLM"
    assert {name: tuple(one.shape) for name, one in batch.items()} == {
        "input_ids": (4, 512),
        "labels": (4, 512),
    }
    model = found.step.__closure__[[*found.step.__code__.co_freevars].index("model")].cell_contents
    assert {one.device.type for one in model.parameters()} == {"meta"}
    assert {one.dtype for one in model.parameters()} == {torch.bfloat16}
    assert (found.weights, model.training, model.config.use_cache) == ("out_in", True, False)


def test_a_folder_and_a_class_by_default(saved, tmp_path):
    saved(transformers.LlamaConfig(**LLAMA))
    assert target(str(tmp_path)).name == "LlamaForCausalLM"


BERT = transformers.BertConfig(intermediate_size=128, **SMALL)
VIT = transformers.ViTConfig(image_size=32, patch_size=8, intermediate_size=128, **SMALL)


@pytest.mark.parametrize(("config", "name", "shapes"), [
    (BERT, "BertForMaskedLM", {"input_ids": (4, 32), "labels": (4, 32)}),
    (BERT, "BertForSequenceClassification", {"input_ids": (4, 32), "labels": (4,)}),
    (VIT, "ViTForImageClassification", {"pixel_values": (4, 3, 32, 32), "labels": (4,)}),
    (VIT, "ViTModel", {"pixel_values": (4, 3, 32, 32)}),
])  # fmt: skip
def test_a_step_of_each_kind_computes_a_loss(saved, config, name, shapes):
    config.architectures = [name]
    found = target(saved(config), sequence=32)
    assert {key: tuple(one.shape) for key, one in found.args[0].items()} == shapes
    assert found.step(*found.args).shape == ()


def test_weights_that_are_packed_in_before_out(saved):
    config = transformers.GPT2Config(
        n_layer=1, n_embd=32, n_head=2, architectures=["GPT2LMHeadModel"]
    )
    assert target(saved(config), dtype="float16").weights == "in_out"


def test_a_padded_vocabulary(saved):
    config = transformers.LlamaConfig(architectures=["LlamaForCausalLM"], **LLAMA)
    found = target(saved(config), pad_vocab=128)
    model = found.step.__closure__[[*found.step.__code__.co_freevars].index("model")].cell_contents
    assert model.lm_head.weight.shape == (1024, 64)


def test_the_command(saved, monkeypatch, capsys):
    asked = []

    def estimate(step, args, mesh, plan=None, **options):
        asked.append((step.__name__, args, plan))
        return fitting()

    monkeypatch.setitem(vars(planner), "estimate", estimate)
    path = saved(transformers.LlamaConfig(architectures=["LlamaForCausalLM"], **LLAMA))
    words = ["plan", "--hf", path, "--mesh", "v5e:4x4", "--plan", "fsdp"]
    assert main([*words, "--sequence", "64"]) == 0
    assert main([*words, "--batch", "5"]) == 0
    assert [one[0] for one in asked] == ["LlamaForCausalLM"] * 2
    assert asked[0][1][0]["input_ids"].shape == (16, 64)
    assert asked[1][1][0]["input_ids"].shape == (5, 2048)
    assert asked[0][2] == Plan.fsdp("data")


def refused(capsys, *words):
    assert main(["plan", "--mesh", "cpu:8", "--hf", *words]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(("content", "message"), [
    ("{", "config.json is not JSON: Expecting property name"),
    ("[]", "config.json is not a configuration of transformers: it has no 'model_type'"),
    ('{"model_type": "nothing"}', "has no model 'nothing' ("),
    ('{"model_type": "llama", "architectures": ["Missing"]}',
     "names the architecture 'Missing', and transformers "),
    ('{"model_type": "vit"}', "names no class in 'architectures'; add one, such as \"archi"),
    ('{"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"]}',
     "takes 'input_features', and --hf supports models of 'input_ids' or 'pixel_values'"),
    (json.dumps({"model_type": "gpt2", "n_embd": 10, "n_head": 3, "n_layer": 1}),
     "GPT2LMHeadModel cannot be created from "),
])  # fmt: skip
def test_bad_configurations(tmp_path, capsys, content, message):
    path = tmp_path / "config.json"
    path.write_text(content)
    assert message in refused(capsys, str(path))


def test_bad_options(saved, capsys):
    path = saved(
        transformers.LlamaConfig(
            architectures=["LlamaForCausalLM"], max_position_embeddings=64, **LLAMA
        )
    )
    assert "--dtype 'int8': parameters can be float32" in refused(capsys, path, "--dtype", "int8")
    assert "--sequence 65: the configuration has 64 positions" in (
        refused(capsys, path, "--sequence", "65")
    )


def test_missing_packages(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert refused(capsys, "config.json") == (
        "isoshard plan: --hf needs torch and transformers, which is not installed. "
        f"Fix: {install_command('models')}\n"
    )
