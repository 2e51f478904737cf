"""What users bring: programs of other libraries, each a function of the device it runs on.

A case makes everything on the CPU from fixed seeds, moves it with `.to(device)` (or by the one line
that the library has for it), and returns numbers that must be those of CPU torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

Numbers = list[Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """A program of a library.

    Attributes:
        library: the name of its distribution.
        what: what it does, in a few words.
        line: the line that differs from a CPU program; empty for none.
        run: takes the device's name, and returns tensors and numbers.
        rtol: how far they may be from CPU torch's, relative to the largest of a tensor.
    """

    library: str
    what: str
    line: str
    run: Callable[[str], Numbers]
    rtol: float = 1e-4


CASES: list[Case] = []


def case(library: str, what: str, line: str = '.to("jax")', rtol: float = 1e-4) -> Any:
    """Enter a function in the table."""

    def entered(run: Callable[[str], Numbers]) -> Callable[[str], Numbers]:
        CASES.append(Case(library, what, line, run, rtol))
        return run

    return entered


def data(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers, the same in every run."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def trained(model: torch.nn.Module, loss_of: Callable[[], torch.Tensor], steps: int = 3) -> Numbers:
    """The losses of a few steps of SGD, and what became of the parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(parameter.detach() for parameter in list(model.parameters())[:4])]


def llama() -> Any:
    """A small language model with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


TOKENS = torch.randint(0, 64, (2, 10), generator=torch.Generator().manual_seed(3))


@case("transformers", "Llama: three training steps")
def _training(device: str) -> Numbers:
    model, tokens = llama().to(device), TOKENS.to(device)
    return trained(model, lambda: model(input_ids=tokens, labels=tokens).loss)


@case("transformers", "generate() with a static cache")
def _generate(device: str) -> Numbers:
    model = llama().eval().to(device)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    return [model.generate(TOKENS.to(device), cache_implementation="static", **options)]


@case("transformers", "save_pretrained, from_pretrained")
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


@case("accelerate", "prepare, accumulate, clip, gather", "ACCELERATE_TORCH_DEVICE=jax")
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


@case("transformers", "Trainer: trains and evaluates", "ACCELERATE_TORCH_DEVICE=jax")
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


@case("lightning", "Trainer", 'Trainer(accelerator="jax")')
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


@case("peft", "LoRA: trains, saves, merges")
def _peft(device: str) -> Numbers:
    from peft import LoraConfig, PeftModel, get_peft_model

    torch.manual_seed(1)
    options = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = get_peft_model(llama(), options).to(device)
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


@case("diffusers", "UNet2DModel: three training steps")
def _unet(device: str) -> Numbers:
    from diffusers import UNet2DModel

    torch.manual_seed(0)
    model = UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        block_out_channels=(8, 16),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=4,
    ).to(device)
    x, t = data(2, 1, 8, 8).to(device), torch.tensor([3, 7]).to(device)
    return trained(model, lambda: model(x, t).sample.square().mean())


@case("diffusers", "DDPM noise, DDIM steps")
def _schedulers(device: str) -> Numbers:
    from diffusers import DDIMScheduler, DDPMScheduler

    x, noise = data(2, 1, 8, 8).to(device), data(2, 1, 8, 8, seed=1).to(device)
    noisy = DDPMScheduler().add_noise(x, noise, torch.tensor([10, 500]).to(device))
    scheduler = DDIMScheduler()
    scheduler.set_timesteps(5, device=device)
    sample = noisy
    for t in scheduler.timesteps:
        sample = scheduler.step(sample * 0.1, t, sample).prev_sample
    return [noisy, sample]


@case("torchmetrics", "eleven metrics")
def _metrics(device: str) -> Numbers:
    import torchmetrics as tm

    scores = data(64, 5).softmax(-1).to(device)
    labels = torch.randint(0, 5, (64,), generator=torch.Generator().manual_seed(1)).to(device)
    x, y = data(64, seed=2).to(device), data(64, seed=3).to(device)
    classes = {"task": "multiclass", "num_classes": 5}
    of_labels = (
        tm.Accuracy(**classes),
        tm.F1Score(**classes, average="macro"),
        tm.ConfusionMatrix(**classes),
        tm.AUROC(**classes),
        tm.AveragePrecision(**classes),
        tm.CalibrationError(**classes),
    )
    of_numbers = (
        tm.MeanSquaredError(),
        tm.R2Score(),
        tm.PearsonCorrCoef(),
        tm.SpearmanCorrCoef(),
        tm.ExplainedVariance(),
    )
    found = []
    for metric in of_labels:
        metric = metric.to(device)
        for part in range(0, 64, 32):
            metric.update(scores[part : part + 32], labels[part : part + 32])
        found.append(metric.compute())
    return [*found, *(metric.to(device)(x, y) for metric in of_numbers)]


@case("tensordict", "to, stack, index, mask, consolidate, TensorDictModule")
def _tensordict(device: str) -> Numbers:
    from tensordict import TensorDict
    from tensordict.nn import TensorDictModule

    one = TensorDict({"a": data(4, 3), "b": {"c": data(4)}}, batch_size=[4]).to(device)
    both = torch.stack([one, one * 2])
    mask = (data(4, seed=1) > 0).to(device)
    whole = one.consolidate()
    torch.manual_seed(0)
    module = TensorDictModule(torch.nn.Linear(3, 2), in_keys=["a"], out_keys=["d"]).to(device)
    results = both["a"], both[1, 2]["b", "c"], one[mask]["a"], whole["a"], module(one)["d"]
    return [result.detach() for result in results]


@case("torchrl", "advantages, a replay buffer")
def _torchrl(device: str) -> Numbers:
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage, ReplayBuffer
    from torchrl.objectives.value.functional import generalized_advantage_estimate

    values, later, reward = (data(2, 6, 1, seed=n).to(device) for n in range(3))
    done = torch.zeros(2, 6, 1, dtype=torch.bool).to(device)
    done[0, 3] = True
    found = generalized_advantage_estimate(0.9, 0.95, values, later, reward, done)
    buffer = ReplayBuffer(storage=LazyTensorStorage(8, device=device), batch_size=4)
    buffer.extend(TensorDict({"x": data(8, 3).to(device)}, batch_size=[8]))
    return [*found, buffer[:]["x"]]


def _graph(device: str, name: str) -> Numbers:
    from torch_geometric import nn

    torch.manual_seed(0)
    kinds = {"GCN": nn.GCN, "GAT": nn.GAT, "SAGE": nn.GraphSAGE, "GIN": nn.GIN}
    model = kinds[name](8, 16, num_layers=2, out_channels=4).to(device)
    x = data(20, 8).to(device)
    edges = torch.randint(0, 20, (2, 60), generator=torch.Generator().manual_seed(1)).to(device)
    return trained(model, lambda: model(x, edges).square().mean())


for _name in ("GCN", "GAT", "SAGE", "GIN"):
    case("torch_geometric", f"{_name}: three training steps")(
        lambda device, name=_name: _graph(device, name)
    )


@case("x-transformers", "Decoder: three training steps")
def _decoder(device: str) -> Numbers:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    torch.manual_seed(0)
    layers = Decoder(dim=32, depth=2, heads=4, rotary_pos_emb=True)
    model = TransformerWrapper(num_tokens=64, max_seq_len=16, attn_layers=layers)
    model = AutoregressiveWrapper(model).to(device)
    tokens = TOKENS.to(device)
    return trained(model, lambda: model(tokens))


OPTIMIZERS = ("Lion", "AdaBelief", "Lamb", "AdamP", "Prodigy", "Adan", "AdEMAMix", "CAME", "LARS")


def _optimizer(device: str, name: str) -> Numbers:
    import pytorch_optimizer

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))
    model = model.to(device)
    optimizer = pytorch_optimizer.load_optimizer(name.lower())(model.parameters(), lr=1e-3)
    x, y = data(16, 8).to(device), data(16, 8, seed=1).to(device)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(one.detach() for one in model.parameters())]


for _name in OPTIMIZERS:
    case("pytorch_optimizer", f"{_name}: four steps")(
        lambda device, name=_name: _optimizer(device, name)
    )


@case("einops", "rearrange, reduce, layers")
def _einops(device: str) -> Numbers:
    import einops
    from einops.layers.torch import EinMix, Rearrange

    torch.manual_seed(0)
    x = data(2, 3, 8, 8).to(device)
    mix = EinMix("b c p q -> b d p q", weight_shape="c d", bias_shape="d", c=3, d=4).to(device)
    net = torch.nn.Sequential(Rearrange("b c (h p) (w q) -> b (h w) (p q c)", p=4, q=4))
    found = einops.reduce(x, "b c (h p) (w q) -> b c h w", "max", p=2, q=2), net(x), mix(x)
    return [result.detach() for result in found]
