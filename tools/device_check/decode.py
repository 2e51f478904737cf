"""Greedy decoding of a Llama in bfloat16 with a static cache: tokens per second.

`generate` of transformers runs on the `jax` device and in torch eager, each in its own process. For
the `jax` device the prompt remains on the CPU, where `generate` appends tokens (docs/models.md).
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

import isoshard as iso
from benchmarks.models import llama

from . import workloads

LENGTHS = {"gpu": (8, 128, 128), "cpu": (2, 8, 8)}
"""Sequences of a batch, tokens of each prompt, and tokens to generate for each."""

ROUNDS = {"gpu": 3, "cpu": 1}
LOGITS = 32
"""Logits that are compared, of the first new token of the first sequence."""


def run(part: str, options: Mapping[str, Any], save: Callable[..., None]) -> None:
    """Decode on one device.

    Args:
        part: "isoshard" for the `jax` device, "torch" for torch eager.
        options: of the check; "device" is "cpu" or "gpu".
        save: receives "logits", "tokens_per_second" and details.
    """
    device = options["device"]
    sequences, prompt, new = LENGTHS[device]
    size = dataclasses.replace(workloads.SIZES[device]["llama"], length=prompt + new)
    torch.manual_seed(0)
    model = llama.build(size, eos_token_id=None, pad_token_id=0).to(torch.bfloat16).eval()
    ids = torch.randint(1, size.vocabulary, (sequences, prompt))
    if part == "isoshard":
        import isoshard.torch_bridge  # noqa: F401 (registers the device)

        model = model.to("jax")
    else:
        torch_device = "cuda" if device == "gpu" else "cpu"
        model, ids = model.to(torch_device), ids.to(torch_device)

    def generate(**arguments: Any) -> Any:
        return model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            cache_implementation="static",
            disable_compile=True,  # with a static cache on CUDA transformers calls torch.compile
            **arguments,
        )

    started = time.perf_counter()
    first = generate(return_dict_in_generate=True, output_logits=True)
    logits = first.logits[0][0, :LOGITS].float().tolist()
    save(logits=logits, first_seconds=time.perf_counter() - started)
    generate()
    compilations = len(iso.metrics.compilations())
    times = []
    for _ in range(ROUNDS[device]):
        started = time.perf_counter()
        tokens = generate().cpu()
        times.append(time.perf_counter() - started)
    save(
        tokens_per_second=sequences * new / statistics.median(times),
        sequences=sequences,
        prompt_tokens=prompt,
        new_tokens=new,
        tokens=tokens[:, prompt:].tolist(),
        recompilations=len(iso.metrics.compilations()) - compilations,
    )
