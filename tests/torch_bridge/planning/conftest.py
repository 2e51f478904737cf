"""A host whose rates are known: to measure it takes 25 seconds of processor."""

from collections.abc import Iterator
from types import MappingProxyType
from unittest import mock

import pytest

from isoshard.core.planner.machine import measured_cpu, topologies

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
HOST = measured_cpu.HostRates(
    flops=3e10,
    bandwidth=3e9,
    copied=MappingProxyType({kind: {2: 4e9, 4: 4e9, 8: 5e9} for kind in KINDS}),
    reordered=3.5e9,
    meetings=MappingProxyType({2: 1e-4, 4: 2e-4, 8: 4e-4}),
    waits=MappingProxyType({2: 3e-4, 4: 7e-4, 8: 1e-3}),
    between=3.5e-3,
    fresh=8e8,
    memory=32 * 10**9,
    cores=2,
)


@pytest.fixture(scope="package", autouse=True)
def known_host() -> Iterator[None]:
    """The virtual devices of these tests share it."""
    topologies._of_devices.cache_clear()
    with mock.patch.object(measured_cpu, "host_rates", lambda: HOST):
        yield
    topologies._of_devices.cache_clear()
