"""Libraries that train, tune and save: their loops on the device, and on a mesh."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import torch

import isoshard as iso
from tests.ecosystem.case import (
    ON_A_MESH,
    TOKENS,
    Numbers,
    case,
    data,
    in_one,
    in_rows,
    laid,
    trained,
)
from tests.ecosystem.model_libraries import llama, opt


@case("transformers", "OPT in jax.grad, the gradient in torch.optim", "iso.jax_function(model)")
def _in_jax(device: str) -> Numbers:
    torch.manual_seed(0)
    model = opt().eval().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    if device == "cpu":
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    else:
        f = iso.jax_function(model)
        loss = lambda p, ids: f(p, input_ids=ids, labels=ids).loss  # noqa: E731
        gradients = jax.jit(jax.grad(loss))(f.params, iso.to_jax(TOKENS.to(device)))
        for name, parameter in model.named_parameters():
            parameter.grad = iso.to_torch(gradients[name])
    optimizer.step()
    return [in_one(one.grad for one in model.parameters()), in_one(model.parameters())]


@case("transformers", "generate() with a static cache", again=True)  # in torch_bridge/models
def _generate(device: str) -> Numbers:
    model = llama().eval().to(device)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    return [model.generate(TOKENS.to(device), cache_implementation="static", **options)]


@case("transformers", "save_pretrained, from_pretrained", again=True)  # in torch_bridge/models
def _saved(device: str) -> Numbers:
    model = llama().to(device)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = type(model).from_pretrained(folder, device_map=device).eval()
    return [again(TOKENS.to(device)).logits]


@case("safetensors", "save_model with tied weights, load_file")
def _safetensors(device: str) -> Numbers:
    from safetensors.torch import load_file, save_model

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model.load_state_dict({name: data(*one.shape) for name, one in model.state_dict().items()})
    model[1].weight = model[0].weight
    model.to(device)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model.safetensors")
        save_model(model, path)
        return [value for _, value in sorted(load_file(path).items())]


@contextlib.contextmanager
def chosen(device: str) -> Iterator[None]:
    """accelerate's device by the environment, its state forgotten before and after."""
    from accelerate.state import AcceleratorState, PartialState

    before = os.environ.get("ACCELERATE_TORCH_DEVICE")
    os.environ["ACCELERATE_TORCH_DEVICE"] = device
    try:
        for state in (lambda: AcceleratorState._reset_state(True), PartialState._reset_state):
            state()
        yield
    finally:
        AcceleratorState._reset_state(True)
        PartialState._reset_state()
        os.environ.pop("ACCELERATE_TORCH_DEVICE")
        if before is not None:
            os.environ["ACCELERATE_TORCH_DEVICE"] = before


@case(  # in torch_bridge/trainers
    "accelerate", "prepare, accumulate, clip, gather", "ACCELERATE_TORCH_DEVICE=jax", again=True
)
def _accelerate(device: str) -> Numbers:
    from accelerate import Accelerator

    with chosen(device):
        torch.manual_seed(0)
        accelerator = Accelerator(gradient_accumulation_steps=2)
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        rows = torch.utils.data.TensorDataset(data(16, 4), data(16, 2, seed=1))
        batches = torch.utils.data.DataLoader(rows, batch_size=4)
        model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
        losses = []
        for x, y in batches:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()))
        return losses


@case(  # in torch_bridge/trainers
    "accelerate",
    "save_state, load_state in bfloat16",
    "ACCELERATE_TORCH_DEVICE=jax",
    rtol=2e-2,
    again=True,
)
def _kept(device: str) -> Numbers:
    from accelerate import Accelerator

    with chosen(device), tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        accelerator = Accelerator(mixed_precision="bf16")
        model = torch.nn.Linear(4, 2)
        model, optimizer = accelerator.prepare(
            model, torch.optim.AdamW(model.parameters(), lr=1e-2)
        )
        x, y, losses = data(4, 4).to(device), data(4, 2, seed=1).to(device), []
        for step in range(4):
            with accelerator.autocast():
                loss = torch.nn.functional.mse_loss(model(x).float(), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            if step == 1:
                accelerator.save_state(folder)
        accelerator.load_state(folder)
        return [*losses, *(one.detach() for one in model.parameters())]


@case(  # in torch_bridge/trainers
    "transformers", "Trainer: trains and evaluates", "ACCELERATE_TORCH_DEVICE=jax", again=True
)
def _trainer(device: str) -> Numbers:
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": row, "labels": row} for row in TOKENS.repeat(4, 1)]
    with chosen(device), tempfile.TemporaryDirectory() as folder:
        options = {"report_to": "none", "disable_tqdm": True, "logging_steps": 1}
        arguments = TrainingArguments(folder, num_train_epochs=2, **options)
        trainer = Trainer(llama(), arguments, train_dataset=rows, eval_dataset=rows)
        trainer.train()
        found = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return [*found, trainer.evaluate()["eval_loss"]]


@case("lightning", "Trainer", 'Trainer(accelerator="jax")', again=True)  # in torch_bridge/trainers
def _lightning(device: str) -> Numbers:
    import lightning.pytorch as pl

    losses = []

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = torch.nn.Linear(4, 2)

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
            losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    rows = torch.utils.data.TensorDataset(data(16, 4), data(16, 2, seed=1))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(accelerator=device, max_epochs=2, enable_model_summary=False, **quiet)
    trainer.fit(Model(), torch.utils.data.DataLoader(rows, batch_size=4))
    return losses


@case("lightning", "Fabric", 'Fabric(accelerator="jax")', again=True)  # in torch_bridge/trainers
def _fabric(device: str) -> Numbers:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator=device, devices=1, precision="bf16-mixed")
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    rows = torch.utils.data.TensorDataset(data(16, 4), data(16, 2, seed=1))
    losses = []
    for x, y in fabric.setup_dataloaders(torch.utils.data.DataLoader(rows, batch_size=4)):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        losses.append(loss.detach())
    return losses


def lora() -> torch.nn.Module:
    """A language model with adapters."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    options = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(llama(), options)


@case("peft", "LoRA on a mesh", f"{ON_A_MESH}, xs.compile", again=True)
def _lora_on_a_mesh(device: str) -> Numbers:
    model, ids = laid(lora(), device), in_rows(TOKENS, device)
    return trained(model, lambda: model(input_ids=ids, labels=ids).loss, device != "cpu")


@case("peft", "LoRA: trains, saves, merges", again=True)
def _peft(device: str) -> Numbers:
    from peft import PeftModel

    model = lora().to(device)
    tokens = TOKENS.to(device)
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    losses = []
    for _ in range(3):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = PeftModel.from_pretrained(llama().to(device), folder)
    merged = model.merge_and_unload().eval()
    return [*losses, merged(tokens).logits, again.eval()(tokens).logits]
