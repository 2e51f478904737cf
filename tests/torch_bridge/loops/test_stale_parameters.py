"""An optimizer made before `scan_layers` is told that it trains nothing."""

from __future__ import annotations

import pytest
import torch

import isoshard.torch_bridge as xs
from tests.torch_bridge.loops.decoder_layers import Model, batch, one_by_one, stack


@pytest.mark.parametrize("compiled", [False, True])
def test_an_optimizer_made_before_is_told(compiled):
    model = Model(stack(2)).to("jax")
    early = torch.optim.AdamW(model.parameters())
    model.blocks = xs.scan_layers(model.blocks)

    def step(x: torch.Tensor) -> None:
        early.zero_grad()
        model(x).sum().backward()
        early.step()

    run = xs.compile(step) if compiled else step
    match = r"AdamW\.step\(\): scan_layers has copied 0\.norm\.weight, .*AdamW\(model\.parameters\("
    with pytest.raises(RuntimeError, match=match):
        run(batch().to("jax"))
    late = torch.optim.AdamW(model.parameters())
    model(batch().to("jax")).sum().backward()
    late.step()


def test_an_optimizer_of_layers_that_are_still_used_goes_on():
    layers = stack(2)
    layers[0].out.requires_grad_(False), layers[1].out.requires_grad_(False)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    xs.scan_layers(layers)
    one_by_one(layers, batch()).sum().backward()
    before = layers[0].qkv.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(layers[0].qkv.weight, before)
