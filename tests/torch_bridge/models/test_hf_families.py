"""Families of `transformers` whose configuration has a tensor-parallel plan, on `meta`.

The plan of every family is read; laid out are the models of those that name a style which no
family before them names.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING, PreTrainedConfig

from isoshard import P, Plan, PlanError, make_mesh

FILES = [
    path
    for path in sorted((Path(transformers.__file__).parent / "models").glob("*/configuration_*.py"))
    if "base_model_tp_plan = {" in path.read_text()
]
PLAN = re.compile(r"base_model_tp_plan = \{[^}]*\}")


def with_something_new(files: list[Path]) -> Iterator[Path]:
    """The files that name a style which those before do not."""
    seen: set[str] = set()
    for path in files:
        entries = re.findall(r'": "(\w+)"', "".join(PLAN.findall(path.read_text())))
        if not seen.issuperset(entries):
            yield path
        seen |= set(entries)


FEWER = ("num_hidden_layers", "num_layers", "encoder_layers", "decoder_layers")
HUNYUAN = {"head_dim": 128, "vocab_size": 290944}
# What the defaults of a class leave open, or do not allow with two layers.
NEEDED: dict[str, dict[str, Any]] = {
    "CohereCompassTextConfig": {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
    "DeepseekV2Config": {"moe_intermediate_size": 1408},
    "Dots1Config": {"n_routed_experts": 8, "n_shared_experts": 1},
    "Gemma3nTextConfig": {"num_kv_shared_layers": 0},
    **dict.fromkeys(("HunYuanDenseV1Config", "HunYuanVLTextConfig", "HunYuanMoEV1Config"), HUNYUAN),
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "MinistralConfig": {"head_dim": 128},
    "NemotronConfig": {"num_key_value_heads": 8},
}


def configurations(path: Path) -> list[type[PreTrainedConfig]]:
    """The classes of a file that have a plan of their own."""
    module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
    return [
        one
        for _, one in inspect.getmembers(module, inspect.isclass)
        if issubclass(one, PreTrainedConfig)
        and one.__module__ == module.__name__
        and getattr(one, "base_model_tp_plan", None)
    ]


def small(kind: type[PreTrainedConfig]) -> PreTrainedConfig:
    """A configuration of the published sizes with two layers, or all where it takes no less."""
    needed = NEEDED.get(kind.__name__, {})
    fewer = {name: 2 for name in FEWER if name in inspect.signature(kind).parameters}
    try:
        return kind(**fewer, **needed)
    except (TypeError, ValueError):
        return kind(**needed)


def model_of(kind: type[PreTrainedConfig]) -> torch.nn.Module | None:
    """A model of a configuration without weights; None where it is a part of others only."""
    try:
        classes = MODEL_FOR_CAUSAL_LM_MAPPING.get(kind, None) or MODEL_MAPPING.get(kind, None)
    except ValueError:  # transformers lists a class that its package does not show
        module = kind.__module__.replace("configuration", "modeling")
        classes = getattr(importlib.import_module(module), kind.__name__.replace("Config", "Model"))
    if classes is None:
        return None
    one = classes[0] if isinstance(classes, tuple) else classes
    config = small(kind)
    if not isinstance(config, one.config_class):  # the model of language of a larger one
        config = config.get_text_config()
    with torch.device("meta"):
        return one(config)


@pytest.mark.parametrize("path", [*with_something_new(FILES)], ids=lambda path: path.parent.name)
def test_its_plan_lays_out_its_model(path):
    mesh = make_mesh((2, 4), ("data", "model"))
    for kind in configurations(path):
        model = model_of(kind)
        if model is None:
            Plan.from_hf_tp_plan(kind())
            continue
        shapes = {name: tuple(one.shape) for name, one in model.named_parameters()}
        specs = Plan.from_hf_tp_plan(model).resolve(shapes, mesh).specs
        assert any(spec != P() for spec in specs.values()), kind


def test_every_plan_is_read():
    kinds = [kind for path in FILES for kind in configurations(path)]
    assert len(kinds) >= len(FILES) > 100
    for kind in kinds:
        assert Plan.from_hf_tp_plan({**kind.base_model_tp_plan}).rules, kind


def test_a_model_without_a_plan_is_told_of_the_other_way():
    with torch.device("meta"):
        model = transformers.BertModel(transformers.BertConfig(num_hidden_layers=1))
    with pytest.raises(PlanError, match=r"Plan\.tensor_parallel"):
        Plan.from_hf_tp_plan(model)
