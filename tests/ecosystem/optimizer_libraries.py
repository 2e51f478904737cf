"""Optimizers of pytorch_optimizer: four steps of each."""

from __future__ import annotations

import torch

from tests.ecosystem.case import Numbers, case, data

# SOAP is not among them: it turns by eigenvectors, and on the CPU too two runs that differ in one
# last bit part within four steps.
NAMES = (
    *("Adalite", "AdaBelief", "AdamP", "Adan", "AdEMAMix", "CAME", "DAdaptAdam", "Lamb", "LARS"),
    *("Lion", "Muon", "Prodigy", "Ranger21", "ScheduleFreeAdamW", "Shampoo"),
)
DISTINCT = ("ScheduleFreeAdamW",)
"""Those that the suite runs: this one has two modes, and weights that it does not step from."""
OPTIONS = {"Ranger21": {"num_iterations": 10}, "DAdaptAdam": {"lr": 1.0}}


def _steps(device: str, name: str) -> Numbers:
    import pytorch_optimizer

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))
    model = model.to(device)
    options = {"lr": 1e-3, **OPTIONS.get(name, {})}
    groups = [{"params": [one], "use_muon": one.ndim == 2} for one in model.parameters()]
    parameters = groups if name == "Muon" else model.parameters()
    optimizer = pytorch_optimizer.load_optimizer(name.lower())(parameters, **options)
    if name.startswith("ScheduleFree"):
        optimizer.train()
    x, y = data(16, 8).to(device), data(16, 8, seed=1).to(device)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(one.detach() for one in model.parameters())]


for _name in NAMES:
    case("pytorch_optimizer", f"{_name}: four steps", again=_name not in DISTINCT)(
        lambda device, name=_name: _steps(device, name)
    )
