"""`transformers.Trainer` on the device and on a mesh: as on the CPU, and resumed as one run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge

state = pytest.importorskip("accelerate.state")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

CONFIG = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
ROWS = torch.randint(0, 64, (40, 12), generator=torch.Generator().manual_seed(0))
DATA = [{"input_ids": row, "labels": row} for row in ROWS]


@dataclasses.dataclass
class Run:
    """What training gave: without a stop, and on a mesh, resumed and loaded without it."""

    losses: list[float]
    evaluated: float
    weight: Any = None
    resumed: Any = None
    reloaded: Any = None


def trainer(output: Path, layout: str) -> Any:
    """A Trainer with default arguments, but for what makes it small and quiet."""
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))
    callbacks = []
    if layout != "none":
        from isoshard.torch_bridge.trainers.hugging_face import PlanCallback

        mesh = iso.make_mesh((2, 4), ("data", "model"))
        callbacks = [PlanCallback(mesh, iso.Plan.from_hf_tp_plan(model))]
    arguments = transformers.TrainingArguments(
        output_dir=str(output),
        num_train_epochs=1,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=2,
        report_to="none",
        disable_tqdm=True,
    )
    return transformers.Trainer(
        model, arguments, train_dataset=DATA[:32], eval_dataset=DATA[32:], callbacks=callbacks
    )


def losses(one: Any) -> list[float]:
    return [entry["loss"] for entry in one.state.log_history if "loss" in entry]


def run(folder: Path, device: str, layout: str = "none") -> Run:
    """Train and evaluate; on a mesh also save, go on from a checkpoint, load without it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_TORCH_DEVICE", device)
        try:
            forget()
            first = trainer(folder / "run", layout)
            first.train()
            evaluated = first.evaluate()["eval_loss"]
            weight = first.model.model.layers[0].mlp.up_proj.weight
            if layout == "none":
                return Run(losses(first), evaluated, weight)
            first.save_model(str(folder / "saved"))
            second = trainer(folder / "run", layout)
            second.train(resume_from_checkpoint=str(folder / "run" / "checkpoint-2"))
        finally:
            forget()
    plain = transformers.LlamaForCausalLM.from_pretrained(folder / "saved").eval()
    with torch.no_grad():
        reloaded = plain(input_ids=ROWS[32:], labels=ROWS[32:]).loss.item()
    return Run(losses(first), evaluated, weight, losses(second)[2:], reloaded)


def forget() -> None:
    """accelerate keeps its device for the process."""
    state.AcceleratorState._reset_state(True)
    state.PartialState._reset_state()


@pytest.fixture(scope="module")
def on_the_cpu(tmp_path_factory):
    return run(tmp_path_factory.mktemp("cpu"), "cpu")


@pytest.mark.parametrize("layout", ["none", "tensor-parallel"])
def test_losses_checkpoints_and_resuming(tmp_path, on_the_cpu, layout):
    found = run(tmp_path, "jax", layout)
    assert found.weight.device.type == "jax"
    assert any(getattr(found.weight, "partition_spec", None) or ()) == (layout != "none")
    assert len(found.losses) == len(on_the_cpu.losses) == 4
    assert found.losses == pytest.approx(on_the_cpu.losses, rel=2e-4)
    assert found.evaluated == pytest.approx(on_the_cpu.evaluated, rel=2e-4)
    if layout == "none":
        return
    assert found.resumed == pytest.approx(found.losses[-len(found.resumed) :], rel=1e-6)
    assert found.reloaded == pytest.approx(found.evaluated, rel=2e-4)
