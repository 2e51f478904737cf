"""The entries of torch's operator database that take float32."""

from __future__ import annotations

import functools

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo


@functools.cache
def entries() -> dict[str, OpInfo]:
    """Every entry with float32, by its full name (`var`, `var.unbiased`, ..)."""
    return {info.full_name: info for info in op_db if torch.float32 in info.dtypes}
