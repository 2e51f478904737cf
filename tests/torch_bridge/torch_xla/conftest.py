"""No test leaves a global mesh behind."""

import pytest

from isoshard.torch_bridge.spmd import set_global_mesh


@pytest.fixture(autouse=True)
def no_global_mesh():
    """Forget the global mesh after each test."""
    yield
    set_global_mesh(None)
