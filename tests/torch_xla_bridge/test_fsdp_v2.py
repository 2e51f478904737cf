"""SpmdFullyShardedDataParallel: what is split, that training is the CPU's, outputs, errors."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import isoshard.torch_bridge as xs
from isoshard import P
from isoshard.torch_bridge.spmd import Mesh, ShardingSpec, UnevenWarning
from isoshard.torch_xla_bridge.torch_xla.distributed.fsdp import checkpoint_module
from isoshard.torch_xla_bridge.torch_xla.distributed.fsdp.wrap import (
    always_wrap_policy,
    transformer_auto_wrap_policy,
)
from isoshard.torch_xla_bridge.torch_xla.distributed.parallel_loader import MpDeviceLoader
from isoshard.torch_xla_bridge.torch_xla.experimental.spmd_fully_sharded_data_parallel import (
    SpmdFullyShardedDataParallel as FSDPv2,
)
from isoshard.torch_xla_bridge.torch_xla.experimental.spmd_fully_sharded_data_parallel import (
    shard_first,
)
from tests.torch_bridge.loops.decoder_layers import WIDTH, Block

VOCABULARY, LENGTH, BATCH, STEPS = 32, 6, 8, 2
LAYERS = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
TILED = "{devices=[8,1]0,1,2,3,4,5,6,7}"
FLAT = Mesh(range(8), (8,), ("fsdp",))
GRID = Mesh(range(8), (2, 4), ("data", "fsdp"))


class Decoder(nn.Module):
    """Embedding, a block, and a head tied to the embedding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Identity(nn.Module):
    """Returns what it is told to."""

    def __init__(self, weight: torch.Tensor | None = None, output: Any = lambda y: y):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8) if weight is None else weight)
        self.output = output

    def forward(self, x: torch.Tensor) -> Any:
        return self.output(x * 1)


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, device="jax")


# --- Training -------------------------------------------------------------------------------------


def train(model: nn.Module, mesh: Mesh | None = None, wrap: Any = lambda step: step) -> list[float]:
    """Adam's losses; with a mesh, of batches that a loader splits over all its axes."""
    generator, shape = torch.Generator().manual_seed(1), (BATCH, LENGTH + 1)
    batches = [torch.randint(VOCABULARY, shape, generator=generator)] * STEPS
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = wrap(step)
    if mesh is None:
        return [step(tokens).item() for tokens in batches]
    spec = ShardingSpec(mesh, (mesh.axis_names, None))
    losses = [step(t).item() for t in MpDeviceLoader(batches, "jax", input_sharding=spec)]
    moments = [
        value for state in optimizer.state.values() for value in state.values() if value.dim() > 0
    ]
    parameters = list(model.parameters())
    assert len(moments) == 2 * len(parameters)
    parts = mesh.shape()["fsdp"]
    for tensors in (parameters, moments):
        held: dict[str, int] = collections.Counter()
        for tensor in tensors:
            for shard in tensor.local_shards:
                held[shard.shard_device] += shard.data.nbytes
        whole = sum(tensor.numel() * 4 for tensor in tensors)
        assert set(held.values()) == {whole // parts} and len(held) == 8
    for parameter in parameters:
        if parameter.grad is not None and parameter.dim() > 1:
            assert parameter.grad.sharding_spec == parameter.sharding_spec != ""
    return losses


@pytest.fixture(scope="module")
def on_the_cpu() -> list[float]:
    losses = train(Decoder())
    assert losses[-1] < losses[0]
    return losses


def test_a_decoder_trains_as_on_the_cpu(on_the_cpu):
    """Recomputed, in a compiled step; lazily `guide/fsdp.py` trains one."""

    def wrapped(module: nn.Module, **options: Any) -> nn.Module:
        return FSDPv2(checkpoint_module(module), **options)

    decoder = Decoder()
    before = dict(decoder.named_parameters())
    model = FSDPv2(decoder, mesh=FLAT, auto_wrap_policy=LAYERS, auto_wrapper_callable=wrapped)
    assert sum(isinstance(module, FSDPv2) for module in model.modules()) == 2
    after = [parameter for _, parameter in model.named_parameters()]
    assert all(a is b for a, b in zip(after, before.values(), strict=True))
    assert model.head.weight is model.token.weight
    got = train(model, FLAT, xs.compile)
    assert got == pytest.approx(on_the_cpu, rel=1e-4)


def test_rows_may_be_split_over_another_axis_too(on_the_cpu):
    model = FSDPv2(Decoder(), mesh=GRID, auto_wrap_policy=LAYERS, extra_data_axis="data")
    assert model.token.weight.partition_spec == P("fsdp")
    outputs = []
    model.blocks[0].register_forward_hook(lambda _module, _args, out: outputs.append(out))
    model.register_forward_hook(lambda _module, _args, out: outputs.append(out))
    assert train(model, GRID) == pytest.approx(on_the_cpu, rel=1e-4)
    assert [output.partition_spec for output in outputs] == [P(("data", "fsdp"))] * 2 * STEPS


def test_stacked_layers_are_split_as_one_layer():
    """The axis of the depth is the longest, and is not split."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8) for _ in range(16)]
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    want = nn.Sequential(*layers)(x)
    wrapped = FSDPv2(nn.Sequential(xs.scan_layers(layers)), mesh=FLAT)
    stack = wrapped[0].layers
    assert stack.weight.shape == (16, 8, 8)
    assert stack.weight.partition_spec == stack.bias.partition_spec == P(None, "fsdp")
    got = wrapped(x.to("jax"))
    torch.testing.assert_close(got.detach().cpu(), want.detach(), rtol=1e-4, atol=1e-5)


# --- What is split --------------------------------------------------------------------------------


def test_the_longest_axis_that_divides_is_split():
    for shape, spec in (
        ((16, 8), P("fsdp")),
        ((8, 16), P(None, "fsdp")),
        ((16, 16), P("fsdp")),
        ((8, 12), P("fsdp")),
        ((12, 8, 10), P(None, "fsdp")),
        ((), P()),
        ((2, 3, 32), P(None, None, "fsdp")),
    ):
        module = Identity(torch.zeros(shape))
        assert FSDPv2(module, mesh=FLAT).weight.named_sharding.spec == spec
    linear = nn.Linear(16, 32).to("jax")  # what is marked keeps its layout
    xs.mark_sharding(linear.weight, GRID, ("data", "fsdp"))
    wrapped = FSDPv2(linear, mesh=GRID)
    assert wrapped.weight.partition_spec == P("data", "fsdp")
    assert wrapped.bias.partition_spec == P("fsdp")


def test_what_does_not_divide_stays_whole_with_a_warning():
    with pytest.warns(UnevenWarning, match=r"\(10, 12\).*axis 1 has size 12.*are replicated along"):
        model = FSDPv2(Identity(torch.zeros(10, 12)), mesh=FLAT)
    assert model.weight.named_sharding.spec == P()
    assert model.weight.sharding_spec == "{devices=[1,8]0,1,2,3,4,5,6,7}"
    with pytest.warns(UnevenWarning, match=r"\(5, 3\)"):
        y = model(ones(5, 3))
    assert y.tolist() == [[1.0] * 3] * 5


# --- Outputs --------------------------------------------------------------------------------------


@dataclasses.dataclass
class Output:
    logits: torch.Tensor | None
    loss: Any = None


def test_the_output_is_split_by_rows():
    for make, read in (
        (lambda y: y, lambda out: out),
        (lambda y: (y,), lambda out: out[0]),
        (lambda y: [y], lambda out: out[0]),
        (lambda y: Output(y), lambda out: out.logits),
        (lambda y: {"loss": None, "logits": y}, lambda out: out["logits"]),
        (lambda y: {"last_hidden_state": y}, lambda out: out["last_hidden_state"]),
    ):
        model = FSDPv2(Identity(output=make), mesh=FLAT)
        assert read(model(ones(8, 3))).sharding_spec == TILED
    model = FSDPv2(Identity(output=lambda y: (y, y + 1)), mesh=FLAT)
    with pytest.warns(UserWarning, match="an output of 2 parts only the first"):
        first, second = model(ones(8, 3))
    assert first.sharding_spec == TILED and second.sharding_spec == ""
    model = FSDPv2(Identity(output=lambda y: y.sum()), mesh=FLAT)
    assert model(ones(8, 3)).sharding_spec == "{replicated}"
    shard_first(y := ones(8, 2), GRID, "data")  # the default, by itself
    assert y.partition_spec == P(("data", "fsdp"))


@pytest.mark.filterwarnings("ignore:of an output")
def test_other_outputs_need_a_shard_output_of_the_user():
    for output in ("text", (), (3, "y"), Output(None), {}):
        model = FSDPv2(Identity(output=lambda y, output=output: output), mesh=FLAT)
        with pytest.raises(RuntimeError, match=r"is not known; pass shard_output"):
            model(ones(8, 3))
    calls = []

    def shard(output: Any, mesh: Any) -> None:
        calls.append(mesh)
        xs.mark_sharding(output["second"], mesh, (None, "fsdp"))

    made = Identity(output=lambda y: {"first": y, "second": y * 1})
    output = FSDPv2(made, mesh=FLAT, shard_output=shard)(ones(4, 8))
    assert output["first"].sharding_spec == "" and calls == [FLAT]
    assert output["second"].partition_spec == P(None, "fsdp")


# --- The module's ways ----------------------------------------------------------------------------


def test_names_are_torch_xlas_and_state_dicts_go_back():
    model = FSDPv2(Decoder(), mesh=FLAT, auto_wrap_policy=LAYERS)
    names = list(model.state_dict())
    assert names[0] == "_orig_module.token.weight"
    assert "_orig_module.blocks.0._orig_module.qkv.weight" in names
    assert [n for n, _ in model.named_parameters()] == [
        n for n in names if "gain" not in n and n != "_orig_module.head.weight"
    ]
    state = {name: tensor.cpu() + 1 for name, tensor in model.state_dict().items()}
    assert not model.load_state_dict(state).missing_keys
    assert model.token.weight.partition_spec == P("fsdp")
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor.cpu(), state[name])


def test_attributes_and_items_are_those_of_the_module():
    inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    inner.note = "mine"
    model = FSDPv2(inner, mesh=FLAT.get_jax_mesh())
    assert model.module is inner and model.note == "mine" and model[0] is inner[0]
    assert model.training and not model.eval().training and not inner.training
    with pytest.raises(AttributeError, match="'Sequential' object has no attribute 'absent'"):
        _ = model.absent
    again = copy.deepcopy(model)
    assert again[0] is not inner[0] and again[0].weight.partition_spec == P("fsdp")
    assert again(ones(8, 8)).sharding_spec == TILED


def test_errors():
    def linear() -> nn.Module:
        return nn.Linear(8, 8)

    inner = nn.Sequential(FSDPv2(linear(), mesh=FLAT))
    assert FSDPv2(inner, mesh=FLAT)(ones(8, 8)).sharding_spec == TILED
    for error, module, options, message in (
        (ValueError, linear(), {}, "there is no mesh argument and no global mesh"),
        (
            ValueError,
            linear(),
            {"mesh": Mesh(range(8), (8,), ("x",))},
            r"must have an axis 'fsdp'; its axes are \('x',\)",
        ),
        (
            ValueError,
            linear(),
            {"mesh": Mesh(range(8), (8,))},
            "an axis 'fsdp'; its axes are without names",
        ),
        (
            ValueError,
            linear(),
            {"mesh": GRID, "extra_data_axis": "model"},
            r"no axis 'model'; its axes are \('data', 'fsdp'\)",
        ),
        (RuntimeError, inner[0], {"mesh": FLAT}, "is a SpmdFullyShardedDataParallel already"),
        (
            RuntimeError,
            nn.ModuleList([linear()]),
            {"mesh": FLAT},
            "ModuleList has no forward method",
        ),
        (
            ValueError,
            inner,
            {"mesh": FLAT, "auto_wrap_policy": always_wrap_policy},
            "0 is a SpmdFullyShardedDataParallel already; wrap",
        ),
    ):
        with pytest.raises(error, match=message):
            FSDPv2(module, **options)
