"""torch.distributed.tensor.parallel's names, for modules on the `jax` device.

`ParallelStyle` is torch's own; a style of yours derives from it.

>>> import torch
>>> from isoshard.torch_bridge.distributed import init_device_mesh
>>> mesh = init_device_mesh("jax", (8,), mesh_dim_names=("tp",))
>>> linear = parallelize_module(torch.nn.Linear(4, 16), mesh, ColwiseParallel())
>>> isinstance(ColwiseParallel(), ParallelStyle), linear.weight.partition_spec
(True, P('tp',))
"""

if __name__ != "isoshard.torch_bridge.distributed.tensor.parallel":
    raise ImportError(f"import isoshard.torch_bridge.distributed.tensor.parallel, not {__name__}")

from torch.distributed.tensor.parallel import ParallelStyle

from .api import parallelize_module
from .loss import loss_parallel
from .prepare import PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput
from .style import ColwiseParallel, RowwiseParallel, SequenceParallel

__all__ = [
    "ColwiseParallel",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "loss_parallel",
    "parallelize_module",
]
