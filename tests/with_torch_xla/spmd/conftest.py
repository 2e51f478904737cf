"""torch_xla with SPMD switched on, over the devices that CPU_NUM_DEVICES gives it."""

import pytest
import torch_xla.runtime as xr

from isoshard.torch_xla_bridge import torch_xla_backend

xr.use_spmd()


def pytest_sessionstart(session):
    """Fail the run, rather than skip tests, if the devices are not there."""
    if xr.global_runtime_device_count() != 8:
        raise pytest.UsageError("run this by `make test-torch-xla`: CPU_NUM_DEVICES is not 8")


@pytest.fixture
def backend():
    """The module under test."""
    return torch_xla_backend
