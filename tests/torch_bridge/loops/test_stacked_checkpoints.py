"""`StackedLayers`: checkpoints are those of the layers."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

import isoshard.torch_bridge as xs
from tests.torch_bridge.loops.decoder_layers import (
    WIDTH,
    Model,
    batch,
    close,
    odd,
    one_by_one,
    same_state,
    stack,
)


@pytest.mark.parametrize(("make", "device"), [(stack, "jax"), (odd, "cpu")])
def test_checkpoints_fit_the_plain_model_both_ways(make, device):
    plain, other = Model(make(3)), Model(make(3))
    for parameter in other.parameters():
        parameter.data.mul_(0.5)
    scanned = Model(xs.scan_layers(copy.deepcopy(plain.blocks)))
    scanned.first.load_state_dict(plain.first.state_dict())
    scanned = scanned.to(device)
    same_state(scanned.state_dict(), plain.state_dict())
    assert scanned.state_dict()._metadata.keys() == plain.state_dict()._metadata.keys()

    file = io.BytesIO()
    torch.save(scanned.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, map_location="cpu"))
    same_state(other.state_dict(), plain.state_dict())

    for parameter in other.parameters():
        parameter.data.add_(1)
    kept = dict(scanned.named_parameters())
    assert not any(scanned.load_state_dict(other.state_dict()))
    same_state(scanned.state_dict(), other.state_dict())
    assert all(kept[name] is p for name, p in scanned.named_parameters())
    if make is stack:
        close(scanned(batch().to(device)), other(batch()))


def test_what_it_gives_are_views():
    blocks = xs.scan_layers(stack(3))
    for one in (blocks, copy.deepcopy(blocks).to("jax")):
        weight = one.state_dict()["1.out.weight"]
        assert not weight.requires_grad
        weight.zero_()
        assert one.layers.out.weight[1].abs().sum() == 0 < one.layers.out.weight[2].abs().sum()
    kept = blocks.state_dict(keep_vars=True, prefix="a.")["a.2.out.weight"]
    kept.sum().backward()
    assert blocks.layers.out.weight.grad[:, 0, 0].tolist() == [0, 0, 1]


def test_reading_a_checkpoint_compiles_nothing(counted):
    blocks = xs.scan_layers(stack(5)).to("jax")
    want = {name: tensor.clone() for name, tensor in xs.scan_layers(stack(5)).state_dict().items()}
    xs.sync()
    before = counted("compilations")
    same_state({name: tensor.cpu() for name, tensor in blocks.state_dict().items()}, want)
    file = io.BytesIO()
    torch.save(blocks.state_dict(), file)
    file.seek(0)
    same_state(torch.load(file), want)
    assert counted("compilations") == before


def test_missing_and_unexpected_keys_have_the_names_of_the_layers():
    plain = Model(odd())
    scanned = Model(xs.scan_layers(copy.deepcopy(plain.blocks)))
    state = plain.state_dict()
    del state["blocks.1.down.bias"]
    more = ("blocks.3.up.weight", "blocks.0.up.bias", "blocks.0.mask", "blocks.layers.up.weight")
    state |= {name: torch.zeros(1) for name in more}
    with pytest.raises(
        RuntimeError, match=r'Missing key\(s\).*: "blocks.1.down.bias"\. '
    ) as caught:
        scanned.load_state_dict(state)
    assert all(f'"{name}"' in str(caught.value) for name in more)
    before = scanned.blocks.layers.down.bias.detach().clone()
    state["blocks.0.down.bias"] = torch.full((WIDTH,), 7.0)
    result = scanned.load_state_dict(state, strict=False)
    want = plain.load_state_dict(state, strict=False)
    assert set(result.missing_keys) == {"blocks.1.down.bias"} == set(want.missing_keys)
    assert set(result.unexpected_keys) == set(more) == set(want.unexpected_keys)
    assert torch.equal(scanned.blocks.layers.down.bias[0], state["blocks.0.down.bias"])
    assert torch.equal(scanned.blocks.layers.down.bias[1:], before[1:])


def test_part_of_a_checkpoint_can_be_loaded_on_the_device():
    blocks = xs.scan_layers(stack(3)).to("jax")
    before = blocks.layers.out.weight.detach().cpu()
    state = {"1.out.weight": torch.ones(WIDTH, WIDTH)}
    assert len(blocks.load_state_dict(state, strict=False).missing_keys) == 3 * 11 - 1
    got = blocks.layers.out.weight.cpu()
    assert torch.equal(got[0], before[0]) and torch.equal(got[1], state["1.out.weight"])
    assert torch.equal(got[2], before[2])


def test_tensors_that_do_not_fit_are_named():
    blocks = nn.Sequential(xs.scan_layers(stack(2)))
    before = {name: tensor.clone() for name, tensor in blocks.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.1\.out\.bias: .*\[3\].*\[8\]"):
        blocks.load_state_dict(before | {"0.1.out.bias": torch.zeros(3)})
    with pytest.raises(RuntimeError, match=r'"0\.1\.out\.bias", expected torch\.Tensor'):
        blocks.load_state_dict(before | {"0.1.out.bias": 3})
    half = before | {"0.1.out.bias": torch.zeros(WIDTH, dtype=torch.float16)}
    match = r"one parameter of all.*0\.0\.out\.bias is torch\.float32.*0\.1\.out\.bias is torch\.fl"
    with pytest.raises(RuntimeError, match=match):
        blocks.load_state_dict(half, assign=True)
    blocks.load_state_dict(half)
    assert blocks[0].layers.out.bias.dtype == torch.float32


def test_assigning():
    plain = stack(3)
    with torch.device("meta"):
        empty = nn.ModuleList(type(plain[0])() for _ in range(3))
    blocks = xs.scan_layers(empty)
    blocks.layers.out.requires_grad_(False)
    state = {name: tensor.double() for name, tensor in plain.state_dict().items()}
    blocks.load_state_dict(state, assign=True)
    same_state(blocks.state_dict(), state)
    assert isinstance(blocks.layers.out.weight, nn.Parameter)
    assert not blocks.layers.out.weight.requires_grad and blocks.layers.qkv.weight.requires_grad
    close(blocks(batch().double()), one_by_one(plain.double(), batch().double()))
