"""Benchmark: the first call of a captured step, with and without an adapter of peft.

    python -m benchmarks.first_calls [--quick] [--rounds 5]

The first call of a step of `xs.compile` searches what its code reads, records it and compiles it.
A language model with LoRA trains few parameters through much more code, which the search must not
follow further than it runs. Counted is processor time, of all threads, each in a new process; the
persistent compilation cache is off. Next to it is what the same step takes without `xs.compile`,
and what one takes that is written by hand in JAX, with optax and a `jax.jit` that donates. The
target is 1.2 times that.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterable

from rich.table import Table

from tools.harness import tables
from tools.harness.command import Benchmark

MODELS = {
    "2 layers": ("plain", 2),
    "2 layers, LoRA": ("LoRA", 2),
    "8 layers": ("plain", 8),
    "24 layers": ("plain", 24),
}
QUICK = ("2 layers", "2 layers, LoRA")
_PROGRAM = """
import json, sys, time
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import isoshard.torch_bridge as xs

config = dict(
    vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=int(sys.argv[3]),
    num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64,
)
model = LlamaForCausalLM(LlamaConfig(**config))
if sys.argv[1] == "LoRA":
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
model = model.to("jax")
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)

def step(ids):
    optimizer.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    return loss.detach()

ids = torch.randint(0, 128, (2, 16)).to("jax")
run = xs.compile(step) if sys.argv[2] == "captured" else step
started = time.process_time()
run(ids).item()
print(json.dumps(time.process_time() - started))
"""


_BY_HAND = """
import functools, json, sys, time
import jax
import jax.numpy as jnp
import numpy as np
import optax

WIDTH, HEADS, INNER, VOCAB, LAYERS, RANK = 32, 4, 64, 128, int(sys.argv[3]), 4
rng = np.random.default_rng(0)

def drawn(*shape):
    return jnp.asarray(rng.normal(size=shape).astype(np.float32) * 0.02)

def layer():
    square = {name: drawn(WIDTH, WIDTH) for name in ("q", "k", "v", "o")}
    mlp = {"gate": drawn(WIDTH, INNER), "up": drawn(WIDTH, INNER), "down": drawn(INNER, WIDTH)}
    return {**square, **mlp, "norm1": jnp.ones(WIDTH), "norm2": jnp.ones(WIDTH)}

model = {
    "layers": [layer() for _ in range(LAYERS)],
    "embed": drawn(VOCAB, WIDTH), "head": drawn(WIDTH, VOCAB), "norm": jnp.ones(WIDTH),
}
adapters = [
    {name: (drawn(WIDTH, RANK), jnp.zeros((RANK, WIDTH))) for name in ("q", "v")}
    for _ in range(LAYERS)
]

def normed(x, weight):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight

def rotated(x):
    size = x.shape[-1]
    angles = jnp.arange(x.shape[1])[:, None] / 10_000 ** (jnp.arange(0, size, 2) / size)
    angles = jnp.concatenate([angles, angles], -1)[:, None]
    low, high = jnp.split(x, 2, -1)
    return x * jnp.cos(angles) + jnp.concatenate([-high, low], -1) * jnp.sin(angles)

def loss_of(adapters, model, ids):
    x = model["embed"][ids]
    mask = jnp.tril(jnp.ones((ids.shape[1],) * 2, bool))
    for weights, adapter in zip(model["layers"], adapters):
        def project(name, x):
            y = x @ weights[name]
            if name in adapter:
                y += x @ adapter[name][0] @ adapter[name][1]
            return y.reshape(*ids.shape, HEADS, -1)
        y = normed(x, weights["norm1"])
        q, k, v = (project(name, y) for name in "qkv")
        scores = jnp.einsum("bshd,bmhd->bhsm", rotated(q), rotated(k)) / np.sqrt(WIDTH // HEADS)
        scores = jax.nn.softmax(jnp.where(mask, scores, -1e30), -1)
        x += jnp.einsum("bhsm,bmhd->bshd", scores, v).reshape(x.shape) @ weights["o"]
        y = normed(x, weights["norm2"])
        x += (jax.nn.silu(y @ weights["gate"]) * (y @ weights["up"])) @ weights["down"]
    logits = normed(x, model["norm"]) @ model["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], ids[:, 1:]).mean()

if sys.argv[1] == "LoRA":
    trained, loss = adapters, lambda adapters, ids: loss_of(adapters, model, ids)
else:
    trained, loss = model, lambda model, ids: loss_of([{}] * LAYERS, model, ids)
optimizer = optax.adamw(1e-3)
state = optimizer.init(trained)

@functools.partial(jax.jit, donate_argnums=(0, 1))
def step(trained, state, ids):
    value, gradients = jax.value_and_grad(loss)(trained, ids)
    updates, state = optimizer.update(gradients, state, trained)
    return optax.apply_updates(trained, updates), state, value

ids = jnp.asarray(rng.integers(0, VOCAB, (2, 16)))
jax.block_until_ready((trained, state, ids))
started = time.process_time()
step(trained, state, ids)[2].item()
print(json.dumps(time.process_time() - started))
"""
WAYS = {"captured": _PROGRAM, "lazy": _PROGRAM, "by hand": _BY_HAND}


def main() -> None:
    """Run the benchmark and save `benchmarks/results/first_calls.json`."""
    benchmark = Benchmark(
        "first_calls", __doc__, rounds=5, quick=1, docs=("benchmarks.md", markdown)
    )
    options = benchmark.parse()
    results = measure(options.rounds, QUICK if options.quick else MODELS)
    benchmark.finish(results, table(results))


def measure(rounds: int, models: Iterable[str] = MODELS) -> dict[str, dict[str, float]]:
    """Time first calls, in turns.

    Args:
        rounds: processes of each kind.
        models: which of `MODELS`.

    Returns:
        By model the median seconds of processor time, by each of `WAYS`.
    """
    kinds = [(model, way) for model in models for way in WAYS]
    taken = [{kind: _first_call(*kind) for kind in kinds} for _ in range(rounds)]
    return {
        model: {way: statistics.median(record[model, way] for record in taken) for way in WAYS}
        for model in models
    }


def _first_call(model: str, way: str) -> float:
    adapter, layers = MODELS[model]
    done = subprocess.run(
        [sys.executable, "-c", WAYS[way], adapter, way, str(layers)],
        check=True,
        capture_output=True,
        text=True,
        timeout=600,
    )
    return float(json.loads(done.stdout.splitlines()[-1]))


def table(results: dict[str, dict[str, float]]) -> Table:
    """Show what `measure` found."""
    columns = {
        "captured": "{captured:.1f}",
        "without xs.compile": "{lazy:.1f}",
        "JAX by hand": "{hand:.1f}",
        "captured / by hand": "{ratio:.2f}",
    }
    rows = {
        name: {**row, "hand": row["by hand"], "ratio": row["captured"] / row["by hand"]}
        for name, row in results.items()
    }
    return tables.by_name("first call of a step, seconds of processor time", columns, rows)


markdown = tables.documented(table)


if __name__ == "__main__":
    main()
