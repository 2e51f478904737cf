"""Calls written as text, with names for tensors of one device: evaluated on the CPU and here."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

DTYPES = "float16 float32 float64 bfloat16 int64 int32 int16 int8 uint8 bool complex64".split()


def names(device: str) -> dict[str, Any]:
    """What a call may use: torch's modules, dtypes, and makers of tensors on a device `d`.

    `ones`, `long`, `mask`, `c64` and `zeros` (of int64) take sizes, `ints` and `bools` numbers;
    `x(dtype)` is a matrix of two rows of four.
    """

    def sized(make: Any, **fixed: Any) -> Any:
        def maker(*size: Any, **options: Any) -> torch.Tensor:
            size = size[0] if size and isinstance(size[0], tuple) else size
            return make(size, device=device, **fixed, **options)

        return maker

    return {
        "torch": torch,
        "F": functional,
        "S": torch.special,
        "aten": torch.ops.aten,
        "d": device,
        "ones": sized(torch.ones),
        "long": sized(torch.ones, dtype=torch.int64),
        "mask": sized(torch.ones, dtype=torch.bool),
        "c64": sized(torch.ones, dtype=torch.complex64),
        "zeros": sized(torch.zeros, dtype=torch.int64),
        "ints": lambda *numbers: torch.tensor(numbers, device=device),
        "bools": lambda *values: torch.tensor(values, dtype=torch.bool, device=device),
        "x": lambda dtype: torch.tensor([[3, 1, 2, 2], [0, 5, 5, 1]]).to(device, dtype),
        **{name: getattr(torch, name) for name in DTYPES},
    }


def calls(text: str) -> list[str]:
    """The calls of a text, with `;` or a new line after each."""
    parts = [part.strip() for line in text.splitlines() for part in line.split(";")]
    return [part for part in parts if part]


def outcome(call: str, device: str, **more: Any) -> Any:
    """What a call returns, or the exception that it raises."""
    try:
        return eval(call, names(device) | more)
    except Exception as error:
        return error
