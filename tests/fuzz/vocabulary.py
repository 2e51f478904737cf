"""The names that a program may use besides torch's own; their source is part of every report."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import torch
from torch import nn
from torch.nn import functional

import isoshard as iso
import isoshard.torch_bridge as xs


def data(seed, size, dtype, kind="small"):
    """Numbers, the same on every machine.

    "small" halves, "fine" floats, "special" ones with NaN and inf, or of a "whole" range.
    """
    source = torch.Generator().manual_seed(seed)
    if dtype.is_complex:
        parts = [data(seed + part, size, torch.float32, kind) for part in (0, 1)]
        return torch.complex(*parts)
    if kind == "whole":
        return torch.randint(-(2**63), 2**63 - 1, size, generator=source)
    numbers = torch.randint(-6, 7, size, generator=source)
    if not dtype.is_floating_point:
        return (
            (numbers > 0) if dtype == torch.bool else numbers.abs().to(dtype) - 3 * dtype.is_signed
        )
    if kind == "fine":
        return torch.randn(size, generator=source).to(dtype)
    halves = (numbers / 2).to(dtype)
    if kind == "special":
        halves = halves.masked_fill(numbers == 6, float("nan"))
        halves = halves.masked_fill(numbers == 5, float("inf"))
    return halves


def filled(module, seed):
    """A module whose parameters are known."""
    for number, parameter in enumerate(module.parameters()):
        parameter.data = data(seed + number, tuple(parameter.shape), parameter.dtype, "fine") / 2
    return module


def mark(tensor, mesh, spec, sizes=None, order=None):
    """Lay a tensor out over 8 devices, or some in an order; a CPU tensor stays what it is."""
    if tensor.device.type == "jax":
        devices = None if order is None else [jax.devices()[number] for number in order]
        mesh = iso.make_mesh(mesh, ("x", "y", "z")[: len(mesh)], devices=devices)
        xs.clear_sharding(tensor)
        xs.mark_sharding(tensor, mesh, spec, **({} if sizes is None else {"sizes": sizes}))
    return tensor


def names(device: str) -> dict[str, Any]:
    """The globals of a program that runs on `device`, "cpu" or "jax"."""
    own = {"data": data, "filled": filled, "mark": mark, "xs": xs, "device": device}
    return {"torch": torch, "nn": nn, "F": functional, **own}


def source() -> str:
    """The definitions that a pasted program needs."""
    return "\n\n".join(inspect.getsource(function) for function in (data, filled, mark))
