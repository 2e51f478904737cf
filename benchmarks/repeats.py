"""Unmodified models of transformers with their equal layers as loops: `repeat="auto"`.

Each measurement is a process of its own: GPT-2, Llama, BERT or ViT from a configuration, AdamW, one
`compile`d training step, with layers as they are ("unrolled") and with `repeat="auto"` ("rolled").
"first call" is everything until the first loss: Python code, tracing and XLA's compilation; "xla"
is tracing and compilation alone. Step times of both are measured in turns, in one more process, at
a depth where the unrolled step still compiles soon; once with large layers and few tokens, and once
with many tokens. The losses of eight steps have to agree.

    python -m benchmarks.repeats                # 4 and 48 layers, written to results/
    python -m benchmarks.repeats llama --quick  # 3 and 6 layers, nothing written
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

import isoshard.torch_bridge as xs
from isoshard import metrics
from tools.harness import calls, timing
from tools.harness.command import Benchmark

MODELS = ("gpt2", "llama", "bert", "vit")
VARIANTS = {"unrolled": None, "rolled": "auto"}
SIZES = {"small": (64, 2, 4, 16), "few tokens": (512, 4, 1, 16), "many tokens": (128, 4, 8, 128)}
"""Width, heads, batch and length."""
STEPS, CLOSE = 8, 1e-3
LIMIT = 3000.0


def made(name: str, layers: int, size: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A model from a configuration, and a batch for it."""
    import transformers

    width, heads, batch, length = SIZES[size]
    tokens = torch.randint(256, (batch, length))
    decoder = {"input_ids": tokens, "labels": tokens}
    if name == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=256, n_positions=length, n_embd=width, n_layer=layers, n_head=heads
        )
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
        return transformers.GPT2LMHeadModel(config), decoder
    common = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
    }
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if name == "llama":
        config = transformers.LlamaConfig(
            vocab_size=256, max_position_embeddings=length, num_key_value_heads=heads, **common
        )
        return transformers.LlamaForCausalLM(config), decoder
    if name == "bert":
        config = transformers.BertConfig(
            vocab_size=256, max_position_embeddings=length, **common, **still
        )
        return transformers.BertForMaskedLM(config), decoder
    side = 4 * round(length**0.5)
    config = transformers.ViTConfig(image_size=side, patch_size=4, num_labels=10, **common, **still)
    images = {"pixel_values": torch.randn(batch, 3, side, side)}
    return transformers.ViTForImageClassification(config), images | {
        "labels": torch.randint(10, (batch,))
    }


class Contestant:
    """One training step.

    Args:
        variant: of `VARIANTS`.
        name: of the model.
        layers: its depth.
        size: of `SIZES`.
    """

    def __init__(self, variant: str, name: str, layers: int, size: str):
        """Make the model on the device."""
        torch.manual_seed(0)
        model, batch = made(name, layers, size)
        model.train().to("jax")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

        def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            return loss.detach()

        self.step = xs.compile(step, repeat=VARIANTS[variant])
        self.batch = {name: tensor.to("jax") for name, tensor in batch.items()}
        self.parameters = sum(one.numel() for one in model.parameters())
        xs.sync(wait=True)

    def __call__(self) -> float:
        """One step; gives its loss."""
        return self.step(self.batch).item()


def measure(variant: str, name: str, layers: int, size: str) -> dict[str, Any]:
    """Compile time, memory and losses of one variant at one depth, in this process."""
    contestant = Contestant(variant, name, layers, size)
    metrics.reset()
    started, worked = time.perf_counter(), time.process_time()
    losses = [contestant()]
    first, work = time.perf_counter() - started, time.process_time() - worked
    xla = sum(one.seconds for one in metrics.compilations())
    losses += [contestant() for _ in range(STEPS - 1)]
    memory = xs.memory_analysis(contestant.step)
    said = [line for line in metrics.report().splitlines() if line.startswith("repeat: ")]
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return {
        "losses": losses,
        "first_call_s": first,
        "first_call_cpu_s": work,  # of all threads; steadier on a busy machine
        "xla_s": xla,
        "peak_mib": (memory.argument_size_in_bytes + results + memory.temp_size_in_bytes) / 2**20,
        "parameters_mib": contestant.parameters * 4 / 2**20,
        "said": said[0].partition("  (")[0] if said else "",
    }


def compare(name: str, layers: int, size: str, rounds: int) -> dict[str, Any]:
    """Step times of both variants in turns, in this process."""
    contestants = {one: Contestant(one, name, layers, size) for one in VARIANTS}
    losses = {one: [contestant() for _ in range(3)] for one, contestant in contestants.items()}
    times = timing.interleave(contestants, rounds=rounds)
    ratios = [new / old for new, old in zip(times["rolled"], times["unrolled"], strict=True)]
    return {
        **{f"{one}_ms": statistics.median(found) * 1e3 for one, found in times.items()},
        "ratio": statistics.median(ratios),
        "apart": apart(*losses.values()),
    }


def apart(one: list[float], other: list[float]) -> float:
    """The largest relative difference of losses."""
    return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))


def main() -> None:
    """Measure every model in both variants at both depths, then step times."""
    benchmark = Benchmark("repeats", __doc__, rounds=20, quick=3)
    benchmark.add_workloads(MODELS)
    given = benchmark.parse()
    flat, deep = (3, 6) if given.quick else (4, 48)
    results: dict[str, Any] = {}
    for name in given.workloads:
        found: dict[Any, Any] = {}
        for variant in VARIANTS:
            for layers in (flat, deep):
                one = calls.call(
                    "benchmarks.repeats:measure", variant, name, layers, "small", limit=LIMIT
                )
                found[variant, layers] = results[f"{name}: {variant}, {layers} layers"] = one
                print(name, variant, layers, one, flush=True)
            for what in ("first_call_cpu_s", "xla_s"):
                ratio = found[variant, deep][what] / found[variant, flat][what]
                results[f"{name}: {variant}, {what} of {deep} / {flat} layers"] = ratio
                print(f"{name}: {variant}: {what} {deep} / {flat} layers = {ratio:.2f}", flush=True)
        for layers in (flat, deep):
            off = apart(found["rolled", layers]["losses"], found["unrolled", layers]["losses"])
            if off > CLOSE:
                raise SystemExit(f"{name}, {layers} layers: the losses are {off:.1e} apart")
        for size in ("few tokens", "many tokens"):
            one = calls.call(
                "benchmarks.repeats:compare", name, 2 * flat, size, given.rounds, limit=LIMIT
            )
            results[f"{name}: steps of {2 * flat} layers, {size}"] = one
            print(name, size, one, flush=True)
    benchmark.finish(results)


if __name__ == "__main__":
    main()
