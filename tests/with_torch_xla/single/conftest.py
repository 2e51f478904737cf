"""torch_xla without SPMD, on one device."""

import pytest
import torch_xla.runtime as xr


def pytest_sessionstart(session):
    """Fail the run, rather than skip tests, if there is another number of devices."""
    if xr.global_runtime_device_count() != 1 or xr.is_spmd():
        raise pytest.UsageError("run this by `make test-torch-xla`: CPU_NUM_DEVICES is not 1")
