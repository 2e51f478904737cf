"""accelerate's loop on the device: choosing it, mixed precision, accumulation, gather, state."""

from __future__ import annotations

import pytest
import torch

from isoshard.torch_bridge.trainers import DeviceChoiceWarning

Accelerator = pytest.importorskip("accelerate").Accelerator
AcceleratorState = pytest.importorskip("accelerate.state").AcceleratorState
PartialState = pytest.importorskip("accelerate.state").PartialState


@pytest.fixture(autouse=True)
def begun_anew():
    """accelerate keeps its device for the process."""
    for _ in range(2):
        AcceleratorState._reset_state(True)
        PartialState._reset_state()
        if _ == 0:
            yield


def loop(folder=None, **options):
    torch.manual_seed(0)
    accelerator = Accelerator(**options)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = [(torch.randn(4), torch.randn(2)) for _ in range(16)]
    batches = torch.utils.data.DataLoader(data, batch_size=4)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    losses = []
    for epoch in range(2):
        for x, y in batches:
            with accelerator.accumulate(model):
                with accelerator.autocast():
                    loss = torch.nn.functional.mse_loss(model(x).float(), y)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
        if folder is not None and epoch == 0:
            accelerator.save_state(str(folder))
            kept = model.weight.detach().cpu().clone()
    if folder is not None:
        accelerator.load_state(str(folder))
        assert torch.equal(model.weight.detach().cpu(), kept)
    return accelerator, losses


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2}])
def test_as_on_the_cpu(monkeypatch, tmp_path, options):
    want = loop(cpu=True, **options)[1]
    AcceleratorState._reset_state(True)
    PartialState._reset_state()
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "jax")
    accelerator, losses = loop(tmp_path, **options)
    assert accelerator.device.type == "jax" and losses == pytest.approx(want, rel=1e-4)


def test_the_cpu_is_not_chosen_without_a_word(monkeypatch, recwarn):
    monkeypatch.delenv("ACCELERATE_TORCH_DEVICE", raising=False)
    Accelerator(cpu=True)
    assert not [one for one in recwarn if one.category is DeviceChoiceWarning]
    AcceleratorState._reset_state(True)
    PartialState._reset_state()
    with pytest.warns(DeviceChoiceWarning, match="ACCELERATE_TORCH_DEVICE=jax"):
        assert Accelerator().device.type == "cpu"
