"""A Trainer with default arguments: trains, evaluates, saves, stops in an epoch and goes on."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import isoshard as iso

iso.simulate_devices(8)

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments  # noqa: E402

import isoshard.torch_bridge  # noqa: E402

folder, layout = Path(sys.argv[1]), (sys.argv[2:] or ["none"])[0]
warnings.simplefilter("ignore")
transformers.logging.set_verbosity_error()

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
)
generator = torch.Generator().manual_seed(0)
ROWS = [torch.randint(0, 64, (12,), generator=generator) for _ in range(40)]
DATA = [{"input_ids": row, "labels": row} for row in ROWS]


def trainer(output: Path, **options) -> Trainer:
    torch.manual_seed(1)
    model = LlamaForCausalLM(CONFIG)
    callbacks = []
    if layout != "none":
        from isoshard.torch_bridge.trainers.hugging_face import PlanCallback

        mesh = iso.make_mesh((2, 4), ("data", "model"))
        tensor = layout == "tensor-parallel"
        plan = iso.Plan.from_hf_tp_plan(model) if tensor else iso.Plan.fsdp("model", min_bytes=0)
        callbacks = [PlanCallback(mesh, plan)]
    arguments = TrainingArguments(
        output_dir=str(output),
        num_train_epochs=2,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        learning_rate=1e-2,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        **options,
    )
    return Trainer(
        model, arguments, train_dataset=DATA[:32], eval_dataset=DATA[32:], callbacks=callbacks
    )


def losses(one: Trainer) -> list[float]:
    return [entry["loss"] for entry in one.state.log_history if "loss" in entry]


first = trainer(folder / "run", save_steps=3)
first.train()
evaluated = first.evaluate()["eval_loss"]
first.save_model(str(folder / "saved"))

second = trainer(folder / "run", save_steps=3)
second.train(resume_from_checkpoint=str(folder / "run" / "checkpoint-3"))
after = losses(second)[3:]

plain = LlamaForCausalLM.from_pretrained(folder / "saved").eval()
with torch.no_grad():
    rows = torch.stack(ROWS[32:])
    reloaded = plain(input_ids=rows, labels=rows).loss.item()

weight = first.model.model.layers[0].mlp.up_proj.weight
report = {
    "device": str(weight.device),
    "split": any(getattr(weight, "partition_spec", None) or ()),
    "losses": losses(first),
    "evaluated": evaluated,
    "resumed": after,
    "reloaded": reloaded,
}
print(json.dumps(report))
