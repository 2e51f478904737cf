"""A fine-tuning loop with adapters of peft that stops, is loaded and goes on: nothing is waited for
twice."""

from __future__ import annotations

import io
import os
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import pytest
import torch
import transformers

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P, Plan

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
"""peft asks by transformers' old name."""
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64}


def tuned() -> Any:
    config = transformers.LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=4)
    torch.manual_seed(0)
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    return peft.get_peft_model(transformers.LlamaForCausalLM(config), adapters)


def test_a_resumed_fine_tuning_captures_and_compiles_nothing(mesh, counted):
    def run(device: str, mode: str) -> list[float]:
        sharded = (
            (lambda x, spec: iso.shard(x, mesh, spec)) if device == "jax" else (lambda x, _: x)
        )
        model = sharded(tuned(), Plan.fsdp("x", min_bytes=1))
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        objects = [model, optimizer, schedule]

        def step(ids: torch.Tensor) -> torch.Tensor:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        run_step = xs.compile(step) if mode == "compiled" else step
        losses, before = [], (0, 0)
        for n in range(5):
            rng = torch.Generator().manual_seed(n)
            ids = torch.randint(0, 64, (4, 8), generator=rng)
            losses.append(float(run_step(sharded(ids, P("x")))))
            schedule.step()
            if n == 1:
                file = io.BytesIO()
                torch.save([thing.state_dict() for thing in objects], file)
                before = counted("compilations"), counted("captures")
                float(run_step(sharded(ids, P("x"))))
                file.seek(0)
                for thing, state in zip(objects, torch.load(file), strict=True):
                    thing.load_state_dict(state)
        assert (counted("compilations"), counted("captures")) == before
        return losses

    expected = run("cpu", "")
    np.testing.assert_allclose(run("jax", "compiled"), expected, rtol=1e-4)
    assert counted("captures") == 1
    np.testing.assert_allclose(run("jax", "lazy"), expected, rtol=1e-4)
