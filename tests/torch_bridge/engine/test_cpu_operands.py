"""CPU tensors beside tensors on the device: what takes part, and what is refused."""

from __future__ import annotations

import pytest
import torch

import isoshard as iso


def test_indices_on_the_device_into_a_cpu_tensor_are_refused():
    table, places = torch.arange(4.0), torch.tensor([0, 1], device="jax")
    for index in (places, places == 0):
        with pytest.raises(RuntimeError, match=r"either on cpu or on the same device .* \(cpu\); "):
            table[index]
    with pytest.raises(RuntimeError, match=r"into a tensor on cpu; move them"):
        table[places] = 1.0
    assert table.to("jax")[torch.tensor([0, 3])].tolist() == [0, 3]
    assert iso.jax_function(lambda i: table[i])(iso.to_jax(places)).tolist() == [0, 1]
