"""The entries of torch's databases that take float32."""

from __future__ import annotations

import functools
import gc

import torch
from torch.testing._internal.opinfo.core import OpInfo

_COMPILED = frozenset(
    {
        *("scan", "map", "cond", "while_loop", "while_loop_stack_output"),
        *("invoke_quant_packed", "auto_functionalize"),
    }
)
"""Higher-order operators that are left out: torch traces them with dynamo, or knows a fixed list of
tensor classes for them, and the device's tensor is not among those; the last one calls an operator
with kernels for the CPU and CUDA alone."""


@functools.cache
def entries() -> dict[str, OpInfo]:
    """Every entry with float32, by its full name (`var`, `var.unbiased`, ..).

    Those of other databases than that of operators follow, with a word before the name: `hop.cond`,
    `custom.NumpySortCustomOp`, `module.nn.Linear`, `optim.Adam`.
    """
    # Torch makes its databases at import, which takes seconds, a third of it to look for garbage.
    gc.disable()
    try:
        from torch.testing._internal.common_methods_invocations import op_db
        from torch.testing._internal.custom_op_db import custom_op_db
        from torch.testing._internal.hop_db import hop_db
    finally:
        gc.enable()

    from . import adapted

    named = {info.full_name: info for info in op_db}
    for kind, database in (("hop", hop_db), ("custom", custom_op_db)):
        named |= {f"{kind}.{info.full_name}": info for info in database}
    named = {
        name: info
        for name, info in named.items()
        if not (name.startswith("hop.") and info.name in _COMPILED)
    }
    named |= adapted.modules() | adapted.optimizers()
    return {name: info for name, info in named.items() if torch.float32 in info.dtypes}
