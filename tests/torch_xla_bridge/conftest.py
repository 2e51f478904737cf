"""No test leaves a global mesh behind; programs run in processes of their own."""

import pytest

from isoshard.torch_bridge.spmd import set_global_mesh
from tests.torch_xla_bridge.processes import Processes


@pytest.fixture(autouse=True)
def no_global_mesh():
    """Forget the global mesh after each test."""
    yield
    set_global_mesh(None)


@pytest.fixture(scope="session")
def processes(tmp_path_factory):
    """Runs programs; each is a process of its own."""
    return Processes(tmp_path_factory.mktemp("processes"))
