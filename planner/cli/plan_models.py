"""`isoshard plan --hf config.json`: a model of transformers by its configuration alone.

The model is created on torch's device "meta", where tensors have shapes and no elements, so that a
configuration of 400 billion parameters takes seconds and no memory. What is planned is a training
step: the model's own loss, its gradient, AdamW.

`isoshard plan --list` prints the known chips, and which can be compiled for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from isoshard.core.kit import human_bytes
from isoshard.planner.machine.chips import Chip, chips
from isoshard.planner.programs.targets import planned

from .plan_strategies import PlanCommandError
from .plan_targets import Target

SEQUENCE = 2048
"""Tokens of a sample, unless the configuration has fewer positions."""


def model_target(
    path: str, *, batch: int, sequence: int | None, dtype: str | None, pad_vocab: int = 1
) -> Target:
    """A training step of a model.

    Args:
        path: of a `config.json`, or of its folder.
        batch: samples of a step, all devices together.
        sequence: tokens of a sample; None: `SEQUENCE`, or as many as there are positions.
        dtype: of the parameters, as torch calls it; None: that of the configuration, else
            float32.
        pad_vocab: the vocabulary is rounded up to a multiple of it.

    Raises:
        PlanCommandError: there is no such file, it is not a configuration of transformers, or the
            model cannot be created from it.
    """
    config = _config(path)
    kind = _class_of(config, path)
    text_config = getattr(config, "text_config", config)
    text_config.use_cache = False
    if hasattr(text_config, "vocab_size"):
        text_config.vocab_size += -text_config.vocab_size % pad_vocab
    try:
        with torch.device("meta"):
            model = kind(config)
    except Exception as error:
        raise PlanCommandError(
            f"{kind.__name__} cannot be created from {path}: {type(error).__name__}: {error}"
        ) from error
    model = model.to(_dtype(dtype, config)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def train_step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        loss = _loss(model(**batch))
        loss.backward()
        optimizer.step()
        return loss.detach()

    arrays = _batch(model, config, batch, sequence)
    packed = any(type(module).__name__ == "Conv1D" for module in model.modules())
    train_step.__name__ = kind.__name__
    return Target(kind.__name__, train_step, (arrays,), "in_out" if packed else "out_in")


def _config(path: str) -> Any:
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    if not file.is_file():
        raise PlanCommandError(f"--hf: there is no file {str(file)!r}")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise PlanCommandError(f"--hf: {file} is not JSON: {error}") from None
    if not isinstance(content, dict) or "model_type" not in content:
        raise PlanCommandError(
            f"--hf: {file} is not a configuration of transformers: it has no 'model_type'"
        )
    mapping = transformers.CONFIG_MAPPING
    if content["model_type"] not in mapping:
        raise PlanCommandError(
            f"--hf: transformers {transformers.__version__} has no model {content['model_type']!r} "
            f"({file}: 'model_type')"
        )
    try:
        return transformers.AutoConfig.from_pretrained(str(file))
    except Exception as error:
        raise PlanCommandError(f"--hf: {file}: {type(error).__name__}: {error}") from error


def _class_of(config: Any, path: str) -> Callable[[Any], Any]:
    """The class of the model: the first of `architectures`, else the one for causal language."""
    for name in config.architectures or ():
        cls = getattr(transformers, name, None)
        if cls is None:
            raise PlanCommandError(
                f"--hf: {path} names the architecture {name!r}, and transformers "
                f"{transformers.__version__} has no such class"
            )
        return cls
    mapping = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in mapping:
        raise PlanCommandError(
            f"--hf: {path} names no class in 'architectures'; add one, such as "
            f'"architectures": ["BertForMaskedLM"]'
        )
    cls: Any = mapping[type(config)]
    return cls[0] if isinstance(cls, tuple) else cls


def _dtype(name: str | None, config: Any) -> torch.dtype:
    if name is None:
        declared = getattr(config, "dtype", None)
        return declared if isinstance(declared, torch.dtype) else torch.float32
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise PlanCommandError(
            f"--dtype {name!r}: parameters can be float32, bfloat16, float16 or float64"
        )
    return dtype


def _batch(model: Any, config: Any, batch: int, sequence: int | None) -> dict[str, torch.Tensor]:
    """Tensors without elements for the model's forward, labels among them where it takes any."""
    name = type(model).__name__
    text_config = getattr(config, "text_config", config)
    arrays: dict[str, torch.Tensor] = {}
    with torch.device("meta"):
        if model.main_input_name == "pixel_values":
            shape = (batch, getattr(config, "num_channels", 3), *_sides(config))
            arrays["pixel_values"] = torch.empty(shape, dtype=model.dtype)
        elif model.main_input_name == "input_ids":
            tokens = _tokens(text_config, sequence)
            arrays["input_ids"] = torch.empty(batch, tokens, dtype=torch.int64)
            if getattr(config, "is_encoder_decoder", False):
                arrays["decoder_input_ids"] = torch.empty(batch, tokens, dtype=torch.int64)
        else:
            raise PlanCommandError(
                f"--hf: {name} takes {model.main_input_name!r}, and --hf supports models of "
                "'input_ids' or 'pixel_values'; write a script with a step, and plan "
                "script.py:step"
            )
        if name.endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")):
            arrays["labels"] = torch.empty_like(arrays["input_ids"])
        elif name.endswith(("ForSequenceClassification", "ForImageClassification")):
            arrays["labels"] = torch.empty(batch, dtype=torch.int64)
        elif name.endswith("ForTokenClassification"):
            arrays["labels"] = torch.empty_like(arrays["input_ids"])
    return arrays


def _sides(config: Any) -> tuple[int, int]:
    size = getattr(config, "image_size", 224)
    return (size, size) if isinstance(size, int) else tuple(size)[:2]


def _tokens(config: Any, sequence: int | None) -> int:
    most = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    most = most if isinstance(most, int) and most > 0 else None
    if sequence is None:
        return min(SEQUENCE, most or SEQUENCE)
    if most is not None and sequence > most:
        raise PlanCommandError(f"--sequence {sequence}: the configuration has {most} positions")
    return sequence


def _loss(result: Any) -> torch.Tensor:
    """The model's own loss, or the mean square of its output."""
    loss = getattr(result, "loss", None)
    return result[0].float().square().mean() if loss is None else loss


EXAMPLES = {"tpu2": "16x16", "tpu3": "8x8x8", "gpu0": "2x8", "cpu0": "64"}
"""A grid by platform and axes of the torus."""


def show_machines(console: Console) -> None:
    """Print chips and targets."""
    console.print(Text("Chips (--mesh CHIP:GRID; slices as in v5e:2*16x16)", style="bold"))
    table = Table(
        box=None if console.options.ascii_only else SIMPLE_HEAD, pad_edge=False, show_edge=False
    )
    table.add_column("chip", no_wrap=True)
    for name in ("memory", "bf16 TFLOP/s", "memory GB/s", "link GB/s", "network GB/s"):
        table.add_column(name, justify="right")
    table.add_column("such as", no_wrap=True)
    for chip in chips():
        links = f"{chip.link / 1e9:.3g}{f' x {chip.links}' if chip.links else ''}"
        table.add_row(
            chip.name,
            human_bytes(chip.memory),
            f"{chip.rate('bfloat16') / 1e12:.3g}",
            f"{chip.bandwidth / 1e9:.4g}",
            links,
            f"{chip.network / 1e9:.3g}",
            f"{chip.name}:{_grid(chip)}",
        )
    console.print(table)
    console.print(Text("\nWhat can be planned here", style="bold"))
    console.print(Text("depth trace: every machine"))
    for chip in planned():
        versions = ", ".join(f"{name} {version}" for name, version in chip.versions.items())
        text = f"no, {chip.problem}: {chip.fix}" if chip.problem else versions
        console.print(Text(f"{chip.title}: {text}"))


def _grid(chip: Chip) -> str:
    if chip.shapes:
        return "x".join(map(str, chip.shapes[-1]))
    return EXAMPLES.get(f"{chip.platform}{chip.links}", "8")
