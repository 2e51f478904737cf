"""torch_xla's C++ tracer on the same step and chain, on one virtual CPU device.

PJRT_DEVICE=CPU python -m benchmarks.peers.torch_xla_tracing --rounds 20
"""

from __future__ import annotations

import gc
import json

import torch
import torch_xla
import torch_xla.core.xla_model as xla_model

from benchmarks import phases
from benchmarks.models import gpt2
from benchmarks.peers import clock


def main() -> None:
    """Time tracing and print it."""
    rounds = clock.recording_rounds()
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
    print(json.dumps({"recording": phases.summary(steps, counts, chains)}))


if __name__ == "__main__":
    main()
