"""SpmdFullyShardedDataParallel: its outputs, names, attributes and errors."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import isoshard.torch_bridge as xs
from isoshard import P
from isoshard.torch_bridge.spmd import Mesh, set_global_mesh
from isoshard.torch_bridge.torch_xla.distributed.fsdp.wrap import (
    always_wrap_policy,
)
from isoshard.torch_bridge.torch_xla.experimental.spmd_fully_sharded_data_parallel import (
    SpmdFullyShardedDataParallel as FSDPv2,
)
from isoshard.torch_bridge.torch_xla.experimental.spmd_fully_sharded_data_parallel import (
    shard_first,
)
from tests.torch_bridge.torch_xla.fsdp_models import (
    LAYERS,
    Decoder,
    Identity,
)


@pytest.fixture
def flat() -> Mesh:
    return Mesh(range(8), (8,), ("fsdp",))


@pytest.fixture
def grid() -> Mesh:
    return Mesh(range(8), (2, 4), ("data", "fsdp"))


# --- Outputs --------------------------------------------------------------------------------------


@dataclasses.dataclass
class Output:
    logits: torch.Tensor | None
    loss: Any = None


TILED = "{devices=[8,1]0,1,2,3,4,5,6,7}"


@pytest.mark.parametrize(
    ("make", "read"),
    [
        (lambda y: y, lambda out: out),
        (lambda y: (y,), lambda out: out[0]),
        (lambda y: [y], lambda out: out[0]),
        (lambda y: Output(y), lambda out: out.logits),
        (lambda y: {"loss": None, "logits": y}, lambda out: out["logits"]),
        (lambda y: {"last_hidden_state": y}, lambda out: out["last_hidden_state"]),
    ],
)
def test_the_output_is_split_by_rows(make, read, flat):
    model = FSDPv2(Identity(output=make), mesh=flat)
    assert read(model(torch.ones(8, 3, device="jax"))).sharding_spec == TILED


def test_of_a_tuple_the_first_is_split_with_a_warning(flat):
    model = FSDPv2(Identity(output=lambda y: (y, y + 1)), mesh=flat)
    with pytest.warns(UserWarning, match="an output of 2 parts only the first"):
        first, second = model(torch.ones(8, 3, device="jax"))
    assert first.sharding_spec == TILED and second.sharding_spec == ""


def test_a_scalar_output_is_whole(flat):
    model = FSDPv2(Identity(output=lambda y: y.sum()), mesh=flat)
    assert model(torch.ones(8, 3, device="jax")).sharding_spec == "{replicated}"


@pytest.mark.parametrize(
    "make", [lambda y: "text", lambda y: (), lambda y: (3, y), lambda y: Output(None), lambda y: {}]
)
@pytest.mark.filterwarnings("ignore:of an output")
def test_other_outputs_ask_for_shard_output(make, flat):
    model = FSDPv2(Identity(output=make), mesh=flat)
    with pytest.raises(RuntimeError, match=r"is not known; pass shard_output"):
        model(torch.ones(8, 3, device="jax"))


def test_shard_output_of_the_user(flat):
    calls = []

    def shard(output: Any, mesh: Any) -> None:
        calls.append(mesh)
        xs.mark_sharding(output["second"], mesh, (None, "fsdp"))

    model = FSDPv2(
        Identity(output=lambda y: {"first": y, "second": y * 1}), mesh=flat, shard_output=shard
    )
    output = model(torch.ones(4, 8, device="jax"))
    assert output["first"].sharding_spec == "" and calls == [flat]
    assert output["second"].partition_spec == P(None, "fsdp")


def test_the_default_may_be_called_by_itself(grid):
    y = torch.ones(8, 2, device="jax")
    shard_first(y, grid, "data")
    assert y.partition_spec == P(("data", "fsdp"))


# --- The module's ways ----------------------------------------------------------------------------


def test_names_are_torch_xlas_and_state_dicts_go_back(flat):
    model = FSDPv2(Decoder(1), mesh=flat, auto_wrap_policy=LAYERS)
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


def test_attributes_and_items_are_those_of_the_module(flat):
    inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    inner.note = "mine"
    model = FSDPv2(inner, mesh=flat)
    assert model.module is inner and model.note == "mine" and model[0] is inner[0]
    assert model.training and not model.eval().training and not inner.training
    with pytest.raises(AttributeError, match="'Sequential' object has no attribute 'absent'"):
        _ = model.absent
    again = copy.deepcopy(model)
    assert again[0] is not inner[0] and again[0].weight.partition_spec == P("fsdp")
    assert again(torch.ones(8, 8, device="jax")).sharding_spec == TILED


def test_the_mesh_may_be_global_or_jaxs(flat):
    set_global_mesh(flat)
    assert FSDPv2(nn.Linear(8, 8)).weight.partition_spec == P("fsdp")
    set_global_mesh(None)
    model = FSDPv2(nn.Linear(8, 8), mesh=flat.get_jax_mesh())
    assert model.weight.partition_spec == P("fsdp")


def test_errors(flat, grid):
    with pytest.raises(ValueError, match="no mesh is given and none is set"):
        FSDPv2(nn.Linear(8, 8))
    with pytest.raises(ValueError, match=r"must have an axis 'fsdp'; its axes are \('x',\)"):
        FSDPv2(nn.Linear(8, 8), mesh=Mesh(range(8), (8,), ("x",)))
    with pytest.raises(ValueError, match=r"an axis 'fsdp'; its axes are without names"):
        FSDPv2(nn.Linear(8, 8), mesh=Mesh(range(8), (8,)))
    with pytest.raises(ValueError, match=r"no axis 'model'; its axes are \('data', 'fsdp'\)"):
        FSDPv2(nn.Linear(8, 8), mesh=grid, extra_data_axis="model")
    with pytest.raises(RuntimeError, match="is a SpmdFullyShardedDataParallel already"):
        FSDPv2(FSDPv2(nn.Linear(8, 8), mesh=flat), mesh=flat)
    with pytest.raises(RuntimeError, match="ModuleList has no forward method"):
        FSDPv2(nn.ModuleList([nn.Linear(8, 8)]), mesh=flat)
    inner = nn.Sequential(FSDPv2(nn.Linear(8, 8), mesh=flat))
    with pytest.raises(ValueError, match="0 is a SpmdFullyShardedDataParallel already; wrap"):
        FSDPv2(inner, mesh=flat, auto_wrap_policy=always_wrap_policy)
    assert FSDPv2(inner, mesh=flat)(torch.ones(8, 8, device="jax")).sharding_spec == TILED
