"""`StackedLayers`: layers with one parameter for all run and train as they do apart."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import isoshard.torch_bridge as xs
from tests.torch_bridge.loops.decoder_layers import (
    batch,
    close,
    odd,
    one_by_one,
    stack,
)


def test_it_is_the_default_and_says_how_many_layers_it_has():
    blocks = xs.scan_layers(stack(3))
    assert isinstance(blocks, xs.StackedLayers) and len(blocks) == 3
    assert isinstance(xs.scan_layers(stack(2), stacked=False), xs.ScanLayers)
    with pytest.raises(TypeError, match=r"call it to run all of them.*stacked=False"):
        for _ in blocks:
            pass
    with pytest.raises(TypeError, match=r"no modules of single layers"):
        blocks[0]


def test_a_step_with_momentum_and_clipping_is_that_of_the_layers():
    plain = stack(2)
    blocks = xs.scan_layers(copy.deepcopy(plain), checkpoint=True).to("jax")
    mask = torch.randn(6, 6)

    def step_of(run: Any, parameters: list[Any]) -> Any:
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

        def step(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = run(x, mask).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 0.5)
            optimizer.step()
            return loss.detach()

        return step

    mine = xs.compile(step_of(blocks, list(blocks.parameters())))
    theirs = step_of(lambda *args: one_by_one(plain, *args), list(plain.parameters()))
    for number in range(2):
        x = batch(number)
        close(mine(x.to("jax"), mask.to("jax")), theirs(x, mask))
    for (name, got), want in zip(
        blocks.state_dict().items(), plain.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(got.cpu(), want, rtol=1e-2, atol=1e-4, msg=name)


def test_the_program_of_a_step_is_as_long_for_many_layers_as_for_few():
    def lines(count: int) -> int:
        layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(count)]
        model = xs.scan_layers(layers).to("jax")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            model(x).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

        step = xs.compile(step)
        step(torch.ones(2, 6, device="jax"))
        return len(xs.program_text(step).splitlines())

    assert lines(4) <= 1.02 * lines(2)


def test_on_the_cpu_and_in_copies():
    plain = stack(2)
    blocks = xs.scan_layers(plain)
    want = one_by_one(plain, batch())
    close(blocks(batch()), want)
    moved = copy.deepcopy(blocks).to("jax")
    close(moved(batch().to("jax")), want)
    close(copy.deepcopy(moved)(batch().to("jax")), want)
    for one in (blocks, moved):
        again = pickle.loads(pickle.dumps(one))
        close(again.to("jax")(batch().to("jax")), want)


def test_modes_and_frozen_parameters():
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)) for _ in range(2)]
    blocks = xs.scan_layers(layers).to("jax")
    x = torch.ones(8, 6, device="jax")
    assert not torch.equal(blocks(x).cpu(), blocks(x).cpu())
    assert blocks.eval().training is False
    assert torch.equal(blocks(x).cpu(), blocks(x).cpu())
    blocks.requires_grad_(False)
    assert not blocks(x).requires_grad
    blocks.layers[0].bias.requires_grad_()
    blocks.train()(x).sum().backward()
    found = [name for name, p in blocks.named_parameters() if p.grad is not None]
    assert found == ["layers.0.bias"]


def test_buffers_get_their_new_values():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(3)]
    blocks = xs.scan_layers(copy.deepcopy(layers)).to("jax")
    x = torch.randn(8, 6)
    close(blocks(x.to("jax")), one_by_one(layers, x))
    close(blocks.layers[1].running_mean, torch.stack([layer[1].running_mean for layer in layers]))
    assert blocks.state_dict()["2.1.num_batches_tracked"].item() == 1


def test_weights_tied_within_a_layer_stay_tied():
    plain = odd()
    blocks = xs.scan_layers(copy.deepcopy(plain))
    assert blocks.layers.up.weight is blocks.layers.down.weight
    assert [name for name, _ in blocks.named_parameters()] == [
        "layers.up.weight",
        "layers.down.bias",
    ]
    x = batch()
    want = one_by_one(plain, x)
    close(copy.deepcopy(blocks)(x), want)
    blocks = blocks.to("jax")
    got = blocks(x.to("jax"))
    close(got, want)
    want.sum().backward(), got.sum().backward()
    close(blocks.layers.up.weight.grad, torch.stack([layer.up.weight.grad for layer in plain]))


# --- Refused -------------------------------------------------------------------------------------


def test_what_cannot_be_stacked():
    layers = stack(2)
    layers[1].out.bias.requires_grad_(False)
    match = r"out\.bias requires a gradient in some layers only \(not in layer 1\).*stacked=False"
    with pytest.raises(ValueError, match=match):
        xs.scan_layers(layers)

    layers = stack(3)
    layers[2].out.weight = layers[1].out.weight
    with pytest.raises(ValueError, match=r"layers 1 and 2 share out\.weight.*stacked=False"):
        xs.scan_layers(layers)

    layers = stack(2)
    one_by_one(layers, batch()).sum().backward()  # gradients would be lost
    with pytest.raises(ValueError, match=r"0\.\S+ has a gradient.*zero_grad\(\) first"):
        xs.scan_layers(layers)
    layers.zero_grad()
    xs.scan_layers(layers)

    class Counting(nn.Linear):
        def get_extra_state(self) -> int:
            return 1

    with pytest.raises(ValueError, match=r"0 \(Counting\) keeps state outside its tensors"):
        xs.scan_layers([nn.Sequential(Counting(2, 2)) for _ in range(2)])
