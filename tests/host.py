"""What tests take the host to be: two cores of recorded rates, without an accelerator of torch's.

Measuring takes 15 seconds: tests/planner/machine/test_topologies.py does.
"""

from __future__ import annotations

import gc
import sys
from types import MappingProxyType

from isoshard.planner.machine import measured_cpu

measured = measured_cpu.host_rates

RATES = measured_cpu.HostRates(
    flops=1.2e11,
    bandwidth=2.0e10,
    copied=MappingProxyType(
        {
            "all-gather": MappingProxyType({2: 6.0e9, 4: 9.0e9, 8: 9.0e9}),
            "reduce-scatter": MappingProxyType({2: 1.1e10, 4: 1.2e10, 8: 1.5e10}),
            "all-reduce": MappingProxyType({2: 8.0e9, 4: 9.0e9, 8: 6.0e9}),
            "all-to-all": MappingProxyType({2: 6.0e9, 4: 4.0e9, 8: 4.0e9}),
            "collective-permute": MappingProxyType({2: 8.0e9, 4: 8.0e9, 8: 1.1e10}),
        }
    ),
    reordered=1.6e10,
    meetings=MappingProxyType({2: 5.0e-5, 4: 8.0e-5, 8: 1.4e-4}),
    waits=MappingProxyType({2: 1.0e-4, 4: 1.6e-4, 8: 4.0e-4}),
    between=1.5e-3,
    fresh=9.0e8,
    memory=24 * 2**30,
    cores=2,
)


def collect_rarely() -> None:
    """Look for garbage after 20,000 new objects, not 700: tracing makes millions that stay."""
    gc.set_threshold(20_000, 10, 10)


def use_recorded_rates() -> None:
    """Plan for that host in this process, from now on."""
    measured_cpu.host_rates = lambda: RATES


def seed_the_cpu_alone() -> None:
    """Spare `torch.manual_seed` 6 ms, in which it formats the stack for CUDA that is not there."""
    if torch := sys.modules.get("torch"):
        for absent in (torch.cuda, torch.xpu, torch.mtia):
            absent.manual_seed_all = lambda seed: None
