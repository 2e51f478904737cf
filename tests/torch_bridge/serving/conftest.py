"""`transformers` works without a network here, and torch leaves the cores to the eight devices."""

import os

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(autouse=True, scope="package")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # beside eight busy devices, more threads wait for each other
    yield
    torch.set_num_threads(before)
