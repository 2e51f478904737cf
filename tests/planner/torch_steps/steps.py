"""Models and steps for the tests of planning, and the program that a traced step is."""

from __future__ import annotations

import collections

import jax
import torch
import transformers

import isoshard as iso
from benchmarks import collectives
from isoshard import Plan, PlanError

PLANS = {
    "data": Plan.data_parallel("data"),
    "fsdp": Plan.fsdp("data", min_bytes=0),
    "tensor": Plan.tensor_parallel("model"),
    "fsdp x tensor": Plan.fsdp("data", min_bytes=0) * Plan.tensor_parallel("model"),
}


class Mlp(torch.nn.Module):
    """Two linear layers with names that plans know."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(x)))


def llama(layers=1, **more):
    """A small Llama."""
    config = transformers.LlamaConfig(
        **{
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": layers,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "vocab_size": 256,
            "use_cache": False,
            **more,
        }
    )
    return transformers.LlamaForCausalLM(config)


def loss_of(model, batch):
    """What a step of one of these models minimises."""
    if isinstance(model, Mlp):
        return model(batch).square().mean()
    return model(input_ids=batch, labels=batch).loss


def batch_for(model, device="meta"):
    """A batch for one of these models."""
    if isinstance(model, Mlp):
        return torch.ones(8, 32, device=device)
    return torch.zeros(8, 32, dtype=torch.long, device=device)


def training(model, optimizer):
    """A training step."""

    def step(batch):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def compiled(trace):
    """A traced step compiled for the devices that are here."""
    function = jax.extend.core.jaxpr_as_fun(trace.program)
    shapes = [
        jax.ShapeDtypeStruct(module.shape, module.dtype, sharding=module.sharding)
        for module in trace.inputs
    ]
    donated = tuple(result.replaces for result in trace.results if result.replaces is not None)
    with jax.enable_x64(trace.wide):
        return (
            jax.jit(
                lambda *args: function(*args),
                donate_argnums=donated,
                keep_unused=True,
                out_shardings=[result.sharding for result in trace.results],
            )
            .lower(*shapes)
            .compile()
        )


def traffic(text):
    """The collectives of a program: how many of each kind and size."""
    return collections.Counter((use.kind, use.bytes) for use in collectives.find(text))


def batch_layout(plan, batch, mesh):
    """A batch as a plan lays it out for training."""
    try:
        return iso.shard({"batch": batch}, mesh, plan.for_inputs())["batch"]
    except PlanError:
        return iso.shard(batch, mesh, iso.P())
