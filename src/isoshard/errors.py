"""Errors and warnings of isoshard.

>>> import numpy as np
>>> import isoshard as iso
>>> try:
...     iso.shard(np.ones(6), iso.make_mesh((4,), ("x",)), iso.P("x"))
... except iso.errors.UnevenError as error:
...     print(error.code, isinstance(error, iso.ShardingError))
ISO003 True

`CheckpointError`, `PlanError`, `RecompilationWarning` and `ShardingError` are listed in `isoshard`.
Each class has a code, and a section in docs/troubleshooting.md. The errors of weights, planning and
ONNX are in `iso.weights`, `iso.planner` and `iso.onnx`.
"""

from isoshard.core.errors import (
    CaptureError,
    ClusterWarning,
    CopyError,
    DeviceError,
    DistributedError,
    NoValueError,
    PrivateNameError,
    PrivateNameWarning,
    ReplicationWarning,
    SpecError,
    UnevenError,
    UnrepresentableError,
    UntestedVersionWarning,
)
from isoshard.core.errors import (
    CheckpointError as CheckpointError,
)
from isoshard.core.errors import (
    RecompilationWarning as RecompilationWarning,
)
from isoshard.core.errors import (
    ShardingError as ShardingError,
)
from isoshard.core.plan import PlanError as PlanError
from isoshard.core.plan import UnusedRuleWarning

__all__ = [
    "CaptureError",
    "ClusterWarning",
    "CopyError",
    "DeviceError",
    "DistributedError",
    "NoValueError",
    "PrivateNameError",
    "PrivateNameWarning",
    "ReplicationWarning",
    "SpecError",
    "UnevenError",
    "UnrepresentableError",
    "UntestedVersionWarning",
    "UnusedRuleWarning",
]


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
