"""torch_xla's C++ tracer on the same step and chain, on one virtual CPU device."""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xla_model

from benchmarks import phases
from benchmarks.models import gpt2


def measure(rounds: int) -> dict[str, Any]:
    """Time tracing."""
    torch.set_num_threads(1)
    stepper = phases.Stepper(gpt2.problem(phases.FULL), lambda thing: thing.to("xla"))

    def finish() -> None:
        torch_xla.sync()
        xla_model.wait_device_ops()

    for _ in range(phases.SETTLE):
        stepper.step()
        stepper.drop()
        finish()
    counts = stepper.counts()
    stepper.drop()
    finish()
    x = torch.ones(8, 8, device="xla")
    steps, chains = [], []
    for _ in range(rounds):
        gc.collect()
        steps.append(stepper.step())
        stepper.drop()
        finish()
        chains.append(phases.chain(x, x))
        finish()
    return phases.summary(steps, counts, chains)
