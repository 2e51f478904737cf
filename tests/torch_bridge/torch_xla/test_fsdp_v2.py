"""SpmdFullyShardedDataParallel: what is split, that training is the CPU's, and torch_xla's ways."""

from __future__ import annotations

import collections
import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import isoshard.torch_bridge as xs
from isoshard import P
from isoshard.torch_bridge.engine.recording import tape as tapes
from isoshard.torch_bridge.spmd import Mesh, ShardingSpec, UnevenWarning, set_global_mesh
from isoshard.torch_bridge.torch_xla.distributed.fsdp import checkpoint_module
from isoshard.torch_bridge.torch_xla.distributed.fsdp.wrap import (
    always_wrap_policy,
    transformer_auto_wrap_policy,
)
from isoshard.torch_bridge.torch_xla.distributed.parallel_loader import MpDeviceLoader
from isoshard.torch_bridge.torch_xla.experimental.spmd_fully_sharded_data_parallel import (
    SpmdFullyShardedDataParallel as FSDPv2,
)
from tests.torch_bridge.torch_xla.fsdp_models import (
    BATCH,
    LAYERS,
    LENGTH,
    STEPS,
    VOCABULARY,
    Decoder,
    Identity,
)


@pytest.fixture
def flat() -> Mesh:
    return Mesh(range(8), (8,), ("fsdp",))


@pytest.fixture
def grid() -> Mesh:
    return Mesh(range(8), (2, 4), ("data", "fsdp"))


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (BATCH, LENGTH + 1)
    return [torch.randint(VOCABULARY, shape, generator=generator) for _ in range(STEPS)]


def train(model: nn.Module, loader: Any, wrap: Any = lambda step: step) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = wrap(step)
    losses = [step(tokens).item() for tokens in loader]
    assert loss_falls(losses)
    if isinstance(model, FSDPv2):
        assert_split(model, optimizer)
    return losses


def loss_falls(losses: list[float]) -> bool:
    return losses[-1] < losses[0]


def assert_split(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Each of the eight devices holds an eighth of the parameters and of Adam's moments."""
    xs.sync()
    moments = [
        value for state in optimizer.state.values() for value in state.values() if value.dim() > 0
    ]
    assert len(moments) == 2 * len(list(model.parameters()))
    for tensors in (list(model.parameters()), moments):
        whole = sum(tensor.numel() * 4 for tensor in tensors)
        held: dict[str, int] = collections.Counter()
        for tensor in tensors:
            for shard in tensor.local_shards:
                held[shard.shard_device] += shard.data.nbytes
        assert set(held.values()) == {whole // 8} and len(held) == 8


# --- Training -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def on_the_cpu() -> list[float]:
    return train(Decoder(), batches())


@pytest.mark.parametrize("compiled", [False, True], ids=["lazy", "compiled"])
@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
def test_a_decoder_trains_as_on_the_cpu(compiled, recomputed, flat, on_the_cpu):
    def wrapped(module: nn.Module, **options: Any) -> nn.Module:
        return FSDPv2(checkpoint_module(module) if recomputed else module, **options)

    model = FSDPv2(Decoder(), mesh=flat, auto_wrap_policy=LAYERS, auto_wrapper_callable=wrapped)
    assert sum(isinstance(module, FSDPv2) for module in model.modules()) == 3
    loader = MpDeviceLoader(batches(), "jax", input_sharding=ShardingSpec(flat, ("fsdp", None)))
    got = train(model, loader, xs.compile if compiled else lambda step: step)
    assert got == pytest.approx(on_the_cpu, rel=1e-4)


def test_rows_may_be_split_over_another_axis_too(grid, on_the_cpu):
    model = FSDPv2(Decoder(), mesh=grid, auto_wrap_policy=LAYERS, extra_data_axis="data")
    tokens = xs.mark_sharding(batches()[0][:, :-1].to("jax"), grid, (("data", "fsdp"), None))
    inner = model.blocks[0](model.token(tokens))
    for output in (inner, model(tokens)):
        assert output.partition_spec == P(("data", "fsdp"))
    assert model.token.weight.partition_spec == P("fsdp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    losses = []
    for batch in batches():
        batch = xs.mark_sharding(batch.to("jax"), grid, (("data", "fsdp"), None))
        optimizer.zero_grad()
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == pytest.approx(on_the_cpu, rel=1e-4)


def test_gradients_are_the_cpus_and_lie_as_the_parameters(flat):
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(inplace=True), nn.Linear(32, 8))
    twin = FSDPv2(copy.deepcopy(model), mesh=flat, auto_wrap_policy=always_wrap_policy)
    model(x).square().sum().backward()
    twin(x.to("jax")).square().sum().backward()
    for want, got in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(got.grad.cpu(), want.grad, rtol=1e-4, atol=1e-4)
        if got.dim() > 1:
            assert got.grad.sharding_spec == got.sharding_spec != ""


def test_a_wrapped_block_has_its_barrier_in_backward(flat):
    model = FSDPv2(Decoder(2), mesh=flat, auto_wrap_policy=LAYERS)
    model(batches()[0][:, :-1].to("jax")).sum().backward()
    names = [
        tapes.RECIPES[entry[0]].name
        for entry in tapes.recorder().program
        if isinstance(entry[0], int)
    ]
    assert names.count("optimization_barrier") == 2, "the tokens of the root need no gradient"


def test_stacked_layers_are_split_as_one_layer(flat):
    """The axis of the depth is the longest, and is not split."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8) for _ in range(16)]
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    want = nn.Sequential(*layers)(x)
    wrapped = FSDPv2(nn.Sequential(xs.scan_layers(layers)), mesh=flat)
    stack = wrapped[0].layers
    assert stack.weight.shape == (16, 8, 8)
    assert stack.weight.partition_spec == stack.bias.partition_spec == P(None, "fsdp")
    got = wrapped(x.to("jax"))
    torch.testing.assert_close(got.detach().cpu(), want.detach(), rtol=1e-4, atol=1e-5)


def test_the_usage_of_transformers(flat):
    """As its Trainer wraps a model: layers by class, checkpointed, with an output of its own."""
    import transformers
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="sdpa",
        use_cache=False,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.randint(64, (8, 12), generator=torch.Generator().manual_seed(0))

    def shard_output(output: Any, mesh: Mesh) -> None:
        logits = output if isinstance(output, torch.Tensor) else output.logits
        xs.mark_sharding(logits, mesh, ("fsdp", None, None))

    def wrapper(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        return FSDPv2(checkpoint_module(module), *args, **kwargs)

    set_global_mesh(flat)
    want, policy = (
        copy.deepcopy(model),
        functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer}),
    )
    wrapped = FSDPv2(
        model,
        auto_wrap_policy=policy,
        shard_output=shard_output,
        auto_wrapper_callable=wrapper,
    )
    assert all(isinstance(layer, FSDPv2) for layer in wrapped.model.layers)
    losses: list[list[float]] = []
    for each, batch in ((want, tokens), (wrapped, tokens.to("jax"))):
        if each is wrapped:
            xs.mark_sharding(batch, flat, ("fsdp", None))
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2)
        losses.append([])
        for _ in range(3):
            optimizer.zero_grad()
            output = each(input_ids=batch, labels=batch)
            output.loss.backward()
            optimizer.step()
            losses[-1].append(output.loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-4) and loss_falls(losses[1])
    plain = FSDPv2(copy.deepcopy(want))  # without a shard_output, its logits are found as well
    for each in (wrapped, plain):
        logits = each(input_ids=tokens.to("jax")).logits
        assert logits.sharding_spec.startswith("{devices=[8,1,1]")


# --- What is split --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((16, 8), P("fsdp")),
        ((8, 16), P(None, "fsdp")),
        ((16, 16), P("fsdp")),
        ((8, 12), P("fsdp")),
        ((12, 8, 10), P(None, "fsdp")),
        ((24,), P("fsdp")),
        ((), P()),
        ((2, 3, 32), P(None, None, "fsdp")),
    ],
)
def test_the_longest_axis_that_divides_is_split(shape, spec, flat):
    module = Identity(torch.zeros(shape))
    assert FSDPv2(module, mesh=flat).weight.named_sharding.spec == spec


def test_what_does_not_divide_stays_whole_with_a_warning(flat):
    with pytest.warns(UnevenWarning, match=r"\(10, 12\).*axis 1 has size 12.*stay whole"):
        model = FSDPv2(Identity(torch.zeros(10, 12)), mesh=flat)
    assert model.weight.named_sharding.spec == P()
    assert model.weight.sharding_spec == "{devices=[1,8]0,1,2,3,4,5,6,7}"
    with pytest.warns(UnevenWarning, match=r"\(5, 3\)"):
        y = model(torch.ones(5, 3, device="jax"))
    assert y.tolist() == [[1.0] * 3] * 5


def test_marked_parameters_keep_their_layout(flat, grid):
    linear = nn.Linear(16, 32).to("jax")
    xs.mark_sharding(linear.weight, grid, ("data", "fsdp"))
    wrapped = FSDPv2(linear, mesh=grid)
    assert wrapped.weight.partition_spec == P("data", "fsdp")
    assert wrapped.bias.partition_spec == P("fsdp")


def test_parameters_stay_the_same_objects(flat):
    model = Decoder()
    before = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = FSDPv2(model, mesh=flat)
    after = [parameter for _, parameter in wrapped.named_parameters()]
    assert all(a is b for a, b in zip(after, before.values(), strict=True))
    assert wrapped.head.weight is wrapped.token.weight
    assert optimizer.param_groups[0]["params"][0] is wrapped.token.weight
