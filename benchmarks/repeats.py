"""Unmodified models of transformers with their equal layers as loops: `repeat="auto"`.

GPT-2, Llama, BERT or ViT from a configuration, AdamW, one `compile`d training step, with layers as
they are ("unrolled") and with `repeat="auto"` ("rolled").

- "compile": each measurement is a process of its own, at 4 and at 48 layers. "compile" is processor
  time of the first call (Python code, tracing, XLA's compilation and one step) less that of a later
  step; "xla" is wall time of tracing and compilation alone. Compile time does not depend on the
  width, so layers are narrow here; there are as many tokens as a loop needs to be taken
  (`xs.compile`).
- "steps": both variants in turns in one process, wall time and processor time of each step. The
  layers are those of published models at their length: GPT-2 and BERT-base (768 features, 1024
  tokens), ViT-base (768, five images of 196 patches), SmolLM2-135M for Llama (576 features, 3 heads
  of keys and values, 2048 tokens). Six of them, so that the unrolled step compiles soon.

The losses of both have to agree.

    python -m benchmarks.repeats                            # all, written to results/
    python -m benchmarks.repeats llama --part steps         # of one model; the others' stay
    python -m benchmarks.repeats llama --quick              # 3 and 6 layers, nothing written
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import isoshard.torch_bridge as xs
from benchmarks.models.hf_step import training_step
from isoshard import metrics
from tools.harness import calls, tables, timing
from tools.harness.command import Benchmark

MODELS = ("gpt2", "llama", "bert", "vit")
TITLES = {
    "gpt2": "GPT-2",
    "llama": "Llama (SmolLM2-135M)",
    "bert": "BERT-base",
    "vit": "ViT-base",
}
VARIANTS = {"unrolled": None, "rolled": "auto"}
NARROW = (192, 3, 4, 512)
"""Width, heads, batch and length of "compile"."""
PUBLISHED = {
    "gpt2": (768, 12, 1, 1024),
    "bert": (768, 12, 2, 512),
    "vit": (768, 12, 5, 196),
    "llama": (576, 9, 1, 2048),
}
"""The same of "steps"."""
PARTS = ("compile", "steps")
DEPTH, STEPS, CLOSE = 6, 3, 1e-3
LIMIT = 3000.0
Size = Sequence[int]


def build(name: str, layers: int, size: Size) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A model from a configuration, and a batch for it."""
    import transformers

    width, heads, batch, length = size
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
            vocab_size=256,
            max_position_embeddings=length,
            num_key_value_heads=heads // 3,
            use_cache=False,
            **{**common, "intermediate_size": width * 8 // 3},
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
        size: width, heads, batch and length.
    """

    def __init__(self, variant: str, name: str, layers: int, size: Size):
        """Make the model on the device."""
        torch.manual_seed(0)
        model, batch = build(name, layers, size)
        model.train().to("jax")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.step = xs.compile(training_step(model, optimizer), repeat=VARIANTS[variant])
        self.batch = {name: tensor.to("jax") for name, tensor in batch.items()}
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        xs.sync(wait=True)

    def __call__(self) -> float:
        """One step; gives its loss."""
        return self.step(self.batch).item()


def measure(variant: str, name: str, layers: int, size: Size) -> dict[str, Any]:
    """Compile time, memory and losses of one variant at one depth, in this process."""
    contestant = Contestant(variant, name, layers, size)
    metrics.reset()
    started, worked = time.perf_counter(), time.process_time()
    losses = [contestant()]
    first, work = time.perf_counter() - started, time.process_time() - worked
    xla = sum(compilation.seconds for compilation in metrics.compilations())
    losses += [contestant() for _ in range(STEPS - 2)]
    worked = time.process_time()
    losses += [contestant()]
    step = time.process_time() - worked
    memory = xs.memory_analysis(contestant.step)
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return {
        "losses": losses,
        "first_call_s": first,
        "first_call_cpu_s": work,  # of all threads; steadier on a busy machine
        "step_cpu_s": step,
        "compile_cpu_s": work - step,
        "xla_s": xla,
        "peak_mib": (memory.argument_size_in_bytes + results + memory.temp_size_in_bytes) / 2**20,
        "parameters_mib": contestant.parameters * 4 / 2**20,
        "said": mode(),
    }


def compare(name: str, layers: int, size: Size, rounds: int) -> dict[str, Any]:
    """Step times of both variants in turns, in this process."""
    contestants = {variant: Contestant(variant, name, layers, size) for variant in VARIANTS}
    losses = {
        variant: [contestant() for _ in range(STEPS)] for variant, contestant in contestants.items()
    }
    work: dict[str, list[float]] = {variant: [] for variant in VARIANTS}

    def timed(variant: str) -> Callable[[], None]:
        def step() -> None:
            started = time.process_time()
            contestants[variant]()
            work[variant].append(time.process_time() - started)

        return step

    times = timing.interleave(
        {variant: timed(variant) for variant in VARIANTS}, rounds=rounds, warmup=1
    )
    return {
        **{f"{variant}_ms": statistics.median(seconds) * 1e3 for variant, seconds in times.items()},
        **{
            f"{variant}_cpu_ms": statistics.median(seconds[1:]) * 1e3
            for variant, seconds in work.items()
        },
        "ratio": timing.paired(times["rolled"], times["unrolled"]),
        "cpu_ratio": timing.paired(work["rolled"][1:], work["unrolled"][1:]),
        "apart": difference(*losses.values()),
        "said": mode(),
    }


def mode() -> str:
    """What became of the layers."""
    lines = [line for line in metrics.report().splitlines() if line.startswith("repeat: ")]
    return lines[0].partition("  (")[0] if lines else ""


def difference(losses: list[float], other: list[float]) -> float:
    """The largest relative difference of losses."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, other, strict=True))


def compiled(name: str, depths: tuple[int, int], limit: float) -> dict[str, Any]:
    """Both variants at both depths; the deep one as it is last, since it takes by far longest."""
    results: dict[str, Any] = {}
    flat, deep = depths
    for variant, layers in (("rolled", flat), ("rolled", deep), ("unrolled", flat)):
        results[f"{name}: {variant}, {layers} layers"] = _measured(variant, name, layers, LIMIT)
    if limit:
        try:
            figures = _measured("unrolled", name, deep, limit)
            results[f"{name}: unrolled, {deep} layers"] = figures
        except calls.Failed as error:
            print(f"{name}: unrolled, {deep} layers: {error}")
    for layers in depths:
        new, old = (f"{name}: {mode}, {layers} layers" for mode in ("rolled", "unrolled"))
        if old in results:
            off = difference(results[new]["losses"], results[old]["losses"])
            results[f"{name}: losses of {layers} layers apart"] = off
            _agree(f"{name}, {layers} layers", off)
    for variant in VARIANTS:
        few, many = (results.get(f"{name}: {variant}, {layers} layers") for layers in depths)
        for what in ("compile_cpu_s", "xla_s"):
            if few and many:
                ratio = many[what] / few[what]
                results[f"{name}: {variant}, {what} of {deep} / {flat} layers"] = ratio
                print(f"{name}: {variant}: {what} of {deep} / {flat} layers = {ratio:.2f}")
    return results


def _measured(variant: str, name: str, layers: int, limit: float) -> dict[str, Any]:
    figures = calls.call("benchmarks.repeats:measure", variant, name, layers, NARROW, limit=limit)
    print(name, variant, layers, figures, flush=True)
    if variant == "rolled":
        _loops(name, figures["said"])
    return figures


def stepped(name: str, rounds: int) -> dict[str, Any]:
    """Step times of both variants."""
    size = PUBLISHED[name]
    figures = calls.call("benchmarks.repeats:compare", name, DEPTH, size, rounds, limit=LIMIT)
    print(name, figures, flush=True)
    _loops(name, figures["said"])
    _agree(name, figures["apart"])
    return {f"{name}: steps of {DEPTH} layers": figures}


def _loops(name: str, loops: str) -> None:
    if " as " not in loops:
        raise SystemExit(f"{name}: its layers are no loops: {loops}")


def _agree(what: str, off: float) -> None:
    if off > CLOSE:
        raise SystemExit(f"{what}: the losses are {off:.1e} apart")


def markdown(results: Mapping[str, Any]) -> str:
    """The tables of docs/benchmarks.md: steps of both variants, and compilation by depth.

    Args:
        results: results by title, of all models.
    """
    few, many = 4, 48
    steps, deep = [], []
    for name, title in TITLES.items():
        _, _, batch, length = PUBLISHED[name]
        step = results[f"{name}: steps of {DEPTH} layers"]
        ratios = [f"{step[column]:.2f}" for column in ("ratio", "cpu_ratio")]
        steps.append([title, str(batch * length), *ratios])
        row = [title.split("-base")[0].split(" (")[0]]
        for what in ("xla_s", "compile_cpu_s"):
            flat, stacked = (
                results[f"{name}: rolled, {layers} layers"][what] for layers in (few, many)
            )
            row.append(f"{stacked / flat:.1f} ({flat:.1f} s, {stacked:.1f} s)")
        row += [
            f"{results[f'{name}: unrolled, {what} of {many} / {few} layers']:.1f}"
            for what in ("xla_s", "compile_cpu_s")
        ]
        deep.append(row)
    return "\n\n".join(
        [
            tables.markdown(["model", "tokens a step", "step", "processor time"], steps),
            tables.markdown(
                [
                    "model",
                    "tracing and XLA",
                    "first call (processor time)",
                    "unrolled: tracing and XLA",
                    "first call",
                ],
                deep,
            ),
        ]
    )


def main() -> None:
    """Measure each model's compilation and steps; results are written as they come."""
    benchmark = Benchmark("repeats", __doc__, rounds=8, quick=2, docs=("benchmarks.md", markdown))
    benchmark.add_workloads(MODELS)
    benchmark.add("--part", choices=PARTS, help="one of both; default: both")
    benchmark.add(
        "--limit",
        type=float,
        default=LIMIT,
        help="seconds for the deep model as it is; 0: leave it out (%(default)s)",
    )
    options = benchmark.parse()
    depths = (3, 6) if options.quick else (4, 48)
    for name in options.workloads:
        if options.part in (None, "steps"):
            benchmark.finish(stepped(name, options.rounds), merge=True)
        if options.part in (None, "compile"):
            benchmark.finish(compiled(name, depths, options.limit), merge=True)


if __name__ == "__main__":
    main()
