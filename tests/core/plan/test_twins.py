"""One plan on a torch GPT-2 and its Flax NNX twin: equal tables, equal bytes, equal traffic."""

import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import optax
import pytest
import torch
from flax import nnx
from jax.sharding import PartitionSpec as P
from torch.nn import functional as F

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard.core.layout.mesh import make_mesh
from isoshard.core.plan import Plan
from isoshard.core.runtime.hlo_collectives import collectives
from isoshard.jax_bridge import train_step

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS = 64, 16, 32, 4, 1
TORCH_NAMES = {"kernel": "weight", "scale": "weight", "embedding": "weight"}


class TorchBlock(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.c_attn = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = torch.nn.Linear(WIDTH, WIDTH)
        self.mlp = torch.nn.ModuleDict(
            {"c_fc": torch.nn.Linear(WIDTH, 4 * WIDTH), "c_proj": torch.nn.Linear(4 * WIDTH, WIDTH)}
        )

    def forward(self, x):
        qkv = self.c_attn(self.ln_1(x)).view(*x.shape[:2], HEADS, 3, WIDTH // HEADS)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(3))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(x.shape))
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh"))


class TorchGPT2(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.wpe = torch.nn.Embedding(LENGTH, WIDTH)
        self.h = torch.nn.ModuleList(TorchBlock() for _ in range(LAYERS))
        self.ln_f = torch.nn.LayerNorm(WIDTH)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.h:
            x = block(x)
        return self.ln_f(x) @ self.wte.weight.T


class FlaxBlock(nnx.Module):
    def __init__(self, rngs):
        self.ln_1, self.ln_2 = (nnx.LayerNorm(WIDTH, epsilon=1e-5, rngs=rngs) for _ in range(2))
        self.c_attn = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.c_proj = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.mlp = nnx.Dict(
            c_fc=nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs),
            c_proj=nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs),
        )

    def __call__(self, x):
        qkv = self.c_attn(self.ln_1(x)).reshape(*x.shape[:2], HEADS, 3, WIDTH // HEADS)
        q, k, v = jnp.unstack(qkv, axis=3)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.reshape(x.shape))
        return x + self.mlp.c_proj(nnx.gelu(self.mlp.c_fc(self.ln_2(x))))


class FlaxGPT2(nnx.Module):
    def __init__(self, rngs):
        self.wte = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.wpe = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.h = nnx.List([FlaxBlock(rngs) for _ in range(LAYERS)])
        self.ln_f = nnx.LayerNorm(WIDTH, epsilon=1e-5, rngs=rngs)

    def __call__(self, tokens):
        x = self.wte(tokens) + self.wpe.embedding[: tokens.shape[1]]
        for block in self.h:
            x = block(x)
        return self.wte.attend(self.ln_f(x))


FSDP = Plan.fsdp("fsdp", min_bytes=512)
TP = Plan.tensor_parallel("tp")
PLANS = {
    "data": Plan.data_parallel("fsdp"),
    "fsdp": FSDP,
    "tensor": TP,
    "fsdp * tensor": FSDP * TP,
    "logical": Plan(
        {
            "wte.*": ("vocab", "embed"),
            "wpe.*": (None, "embed"),
            "re:.*c_(attn|fc)[.].*": iso.rules.Linear(out="mlp", into="embed"),
            "*.c_proj.*": iso.rules.Linear(out="embed", into="mlp"),
            "*ln_*": None,
        },
        axes={"vocab": "tp", "mlp": "tp", "embed": "fsdp"},
    ),
}


@pytest.fixture(scope="module")
def mesh():
    return make_mesh((2, 4), ("fsdp", "tp"))


def row(leaf):
    """A line of the table in torch's words: names, and the order of a kernel's axes."""
    head, _, last = leaf.name.rpartition(".")
    shape, spec = leaf.shape, tuple(leaf.sharding.spec)
    spec += (None,) * (len(shape) - len(spec))
    if last == "kernel":
        shape, spec = shape[::-1], spec[::-1]
    facts = dataclasses.asdict(leaf)
    del facts["sharding"]
    return {**facts, "name": f"{head}.{TORCH_NAMES.get(last, last)}", "shape": shape, "spec": spec}


def rows(resolved):
    return sorted((row(leaf) for leaf in resolved.leaves), key=lambda row: row["name"])


def bytes_on_devices(shards):
    held = Counter()
    for device, size in shards:
        held[device] += size
    return held


def params_of(model):
    return jax.tree.leaves(nnx.state(model, nnx.Param))


@pytest.mark.parametrize("name", PLANS)
def test_equal_tables_and_equal_bytes(name, mesh):
    plan = PLANS[name]
    model, twin = TorchGPT2(), FlaxGPT2(nnx.Rngs(0))
    of_torch, of_flax = plan.resolve(model, mesh), plan.resolve(twin, mesh)
    assert rows(of_torch) == rows(of_flax)
    assert len(rows(of_torch)) == len(list(model.named_parameters()))
    assert of_torch.bytes_per_device == of_flax.bytes_per_device
    assert of_torch.unused == of_flax.unused

    iso.shard(model, mesh, plan)
    iso.shard(twin, mesh, plan)
    held = bytes_on_devices(
        (shard.device, shard.data.nbytes)
        for parameter in model.parameters()
        for shard in iso.to_jax(parameter).addressable_shards
    )
    assert set(held.values()) == {of_torch.bytes_per_device}
    assert held == bytes_on_devices(
        (shard.device, shard.data.nbytes)
        for array in params_of(twin)
        for shard in array.addressable_shards
    )


BATCH = Plan.batch_activations("fsdp")


def batch(mesh, seed):
    tokens = torch.randint(
        0, VOCABULARY, (8, LENGTH), generator=torch.Generator().manual_seed(seed)
    )
    return iso.shard(tokens, mesh, P("fsdp"))


def step_of_torch(plan, mesh):
    """The text of one step of AdamW, and the loss of the next."""
    model = iso.shard(TorchGPT2(), mesh, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if any(plan.activation_for(name) for name, _ in model.named_modules()):
        xs.constrain_activations(model, mesh, plan)

    @xs.compile
    def step(tokens, labels):
        optimizer.zero_grad()
        scores = F.log_softmax(model(tokens).flatten(0, 1), dim=-1)
        loss = -scores.gather(1, labels.reshape(-1, 1)).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step(batch(mesh, 0), batch(mesh, 1))
    return xs.program_text(step)


def step_of_flax(plan, mesh):
    def loss(model, tokens, labels):
        scores = jax.nn.log_softmax(model(tokens).reshape(-1, VOCABULARY))
        return -jnp.take_along_axis(scores, labels.reshape(-1, 1), axis=1).mean()

    step = train_step(loss, optax.adamw(1e-3), mesh, plan)
    state = step.start(FlaxGPT2(nnx.Rngs(0)))
    tokens, labels = (iso.to_jax(batch(mesh, seed)) for seed in (0, 1))
    return step.lower(state, tokens, labels).compile().as_text()


def traffic(text):
    """How often each kind of collective of each size is sent among how many devices."""
    sent = Counter()
    for found in collectives(text):
        sent[found.kind, found.bytes, found.groups and len(found.groups[0])] += found.times
    return sent


def test_equal_collectives_in_the_compiled_step(mesh):
    plan = FSDP * TP * BATCH
    sent = traffic(step_of_torch(plan, mesh))
    assert sent == traffic(step_of_flax(plan, mesh))
    assert sum(sent.values()) > 0


def test_rows_that_differ_are_seen(mesh):
    model, twin = TorchGPT2(), FlaxGPT2(nnx.Rngs(0))
    wrong = Plan({"*.c_attn.*": P(None, "tp")}, default=None)
    twin.h[0].c_attn.bias = None
    model.h[0].c_attn.bias = None
    assert rows(wrong.resolve(model, mesh)) != rows(wrong.resolve(twin, mesh))
