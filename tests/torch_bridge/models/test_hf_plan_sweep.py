"""Every family of `transformers` whose configuration has a tensor-parallel plan, on `meta`."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING, PreTrainedConfig

from isoshard import P, Plan, make_mesh

PARTS = 16
FOLDER = Path(transformers.__file__).parent / "models"
FILES = [
    path
    for path in sorted(FOLDER.glob("*/configuration_*.py"))
    if "base_model_tp_plan = {" in path.read_text()
]
FEWER = ("num_hidden_layers", "num_layers", "encoder_layers", "decoder_layers")


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
    """A configuration with few layers, and sizes as published."""
    for fewer in ({name: 2 for name in FEWER if name in inspect.signature(kind).parameters}, {}):
        try:
            return kind(**fewer)
        except (TypeError, ValueError):
            continue
    return kind()


def model_of(kind: type[PreTrainedConfig]) -> Any:
    """A model of a configuration without weights; None where it is a part of others only."""
    classes = MODEL_FOR_CAUSAL_LM_MAPPING.get(kind, None) or MODEL_MAPPING.get(kind, None)
    if classes is None:
        return None
    one = classes[0] if isinstance(classes, tuple) else classes
    with torch.device("meta"):
        return one(small(kind))


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(PARTS))
def test_its_plan_lays_out_its_model(part):
    mesh = make_mesh((2, 4), ("data", "model"))
    faults: dict[str, str] = {}
    for path in FILES[part::PARTS]:
        for kind in configurations(path):
            try:
                model = model_of(kind)
                if model is None:
                    Plan.from_hf_tp_plan(kind())
                    continue
                shapes = {name: tuple(one.shape) for name, one in model.named_parameters()}
                specs = Plan.from_hf_tp_plan(model).resolve(shapes, mesh).specs
                if not any(spec != P() for spec in specs.values()):
                    faults[kind.__name__] = "nothing is split"
            except Exception as error:
                faults[kind.__name__] = f"{type(error).__name__}: {error}"
    assert not faults, "\n".join(f"{name}: {fault}" for name, fault in faults.items())


def test_there_are_many():
    assert len(FILES) > 100
