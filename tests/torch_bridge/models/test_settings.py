"""Settings of `transformers` that decide whether a step has static shapes and reads no values."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from tests.torch_bridge.models.families import (
    BATCH,
    LENGTH,
    Batch,
    build,
    language,
    masked,
    padding,
    small,
)

RTOL, ATOL = 1e-4, 1e-5


def gradients(module: torch.nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    """The loss and the gradients of one batch, on the CPU."""
    loss = module(**batch).loss
    loss.backward()
    found = {name: parameter.grad for name, parameter in module.named_parameters()}
    return {name: tensor.detach().cpu() for name, tensor in {"loss": loss, **found}.items()}


def to_jax(batch: Batch) -> Batch:
    return {name: tensor.to("jax") for name, tensor in batch.items()}


def small_mixtral(experts: str) -> torch.nn.Module:
    sizes = {"num_hidden_layers": 1, "num_local_experts": 2, "num_experts_per_tok": 1}
    return build("mixtral", experts_implementation=experts, **sizes)


def test_experts_chosen_by_value_are_right(counted):
    want = gradients(small_mixtral("eager"), language(0))
    got = gradients(small_mixtral("eager").to("jax"), to_jax(language(0)))
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor, rtol=RTOL, atol=ATOL)
    assert counted("fallbacks") == 3  # which experts were chosen, and once more for each of the two


def test_experts_chosen_by_value_are_refused_in_a_compiled_step():
    module = small_mixtral("eager").to("jax")
    step = xs.compile(lambda **batch: module(**batch).loss)
    with pytest.raises(xs.CaptureError, match=r"modeling_mixtral\.py:\d+: a compiled step needs"):
        step(**to_jax(language(0)))


def test_a_mask_of_two_axes_is_read_in_each_step(counted):
    batch = {**masked(0), "attention_mask": padding(0).long()}
    with torch.no_grad():
        want = small("bert")(**batch).loss
        got = small("bert").to("jax")(**to_jax(batch)).loss
        assert counted("transfers.device_to_host") == 1
    torch.testing.assert_close(got.cpu(), want, rtol=RTOL, atol=ATOL)


def test_a_mask_of_two_axes_is_part_of_a_compiled_step(counted):
    cpu, module = small("bert"), small("bert").to("jax")
    step = xs.compile(lambda **batch: module(**batch).logits)
    nothing_masked = torch.ones(BATCH, LENGTH, dtype=torch.long)
    for mask in (padding(0).long(), padding(1).long(), nothing_masked):
        batch = {"input_ids": masked(0)["input_ids"], "attention_mask": mask}
        got = step(**to_jax(batch)).cpu()
        torch.testing.assert_close(got, cpu(**batch).logits, rtol=RTOL, atol=ATOL)
    assert counted("compilations") == 1


def test_a_jax_function_needs_no_value_of_a_mask_of_two_axes(counted):
    """transformers asks for `tensor.jax()` to learn whether JAX traces; else there is none."""
    module = small("bert").eval()
    batch = {"input_ids": masked(0)["input_ids"], "attention_mask": padding(0).long()}
    with torch.no_grad():
        want = module(**batch).logits
    mask = batch["attention_mask"].to("jax")
    assert not hasattr(mask + 1, "jax")
    assert counted("executions") == 0
    function = iso.jax_function(module)
    arrays = {name: iso.to_jax(tensor, copy=True) for name, tensor in batch.items()}
    got = jax.jit(lambda params, arrays: function(params, **arrays).logits)(function.params, arrays)
    torch.testing.assert_close(torch.from_numpy(np.array(got)), want, rtol=RTOL, atol=ATOL)


def test_a_model_with_dropout_trains_and_repeats():
    module = build("gpt2", dropout=0.1, layers=1).to("jax")
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    batch = to_jax(language(0))

    @xs.compile
    def step(**batch):
        loss = module(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    got = [step(**batch).item() for _ in range(4)]
    assert got[-1] < 0.9 * got[0]
    optimizer.param_groups[0]["lr"] = 0.0  # the same weights from now on

    def losses(seed: int) -> list[float]:
        torch.manual_seed(seed)
        return [step(**batch).item() for _ in range(3)]

    first = losses(1)
    assert first == losses(1) and len(set(first)) == 3
    assert first != pytest.approx(losses(2), rel=1e-3)
    assert len(step.replays) == 1
