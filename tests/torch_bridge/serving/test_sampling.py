"""Draws follow the probabilities that transformers' processors leave."""

import numpy as np
import torch
from transformers.generation import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import isoshard.torch_bridge  # noqa: F401 (registers the device)
from isoshard.torch_bridge.serving.sampling import next_tokens

DRAWS, WORDS = 4000, 8


def _draw(logits, temperature, top_p, top_k):
    def row(value, dtype):
        return torch.full((DRAWS,), value, dtype=dtype).to("jax")

    tokens = next_tokens(
        logits.expand(DRAWS, -1).to("jax"),
        row(temperature, torch.float32),
        row(top_p, torch.float32),
        row(top_k, torch.int32),
        row(3, torch.int32),
        torch.arange(DRAWS, dtype=torch.int32).to("jax"),
    )
    return np.bincount(tokens.cpu().numpy(), minlength=WORDS) / DRAWS


def test_draws_are_those_of_transformers_processors():
    logits = torch.tensor([[2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -9.0]])
    for temperature, top_p, top_k in ((1.0, 1.0, 0), (0.7, 0.8, 0), (1.3, 1.0, 3), (1.5, 0.7, 5)):
        warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
        if top_k:
            warpers.append(TopKLogitsWarper(top_k))
        warpers.append(TopPLogitsWarper(top_p))
        expected = warpers(None, logits).softmax(-1)[0].numpy()
        drawn = _draw(logits, temperature, top_p, top_k)
        assert not drawn[expected == 0].any()
        np.testing.assert_allclose(drawn, expected, atol=4 * (0.25 / DRAWS) ** 0.5)
    assert _draw(logits, 0.0, 0.1, 1)[0] == 1
