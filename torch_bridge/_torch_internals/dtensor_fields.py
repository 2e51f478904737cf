"""Private names of `torch.distributed`, looked up at the first DTensor.

>>> ASKING.path
'torch.distributed.tensor._api'
"""

from __future__ import annotations

from .declared import NAMES

LOCAL_TENSOR = NAMES.state(
    "torch.distributed.tensor.DTensor._local_tensor",
    why="is this process's part of a DTensor, replaced where weights are loaded without a copy",
    without="`iso.load_weights` copies into DTensors instead",
)

STRIDED_SHARD = NAMES.state(
    "torch.distributed.tensor.placement_types._StridedShard",
    why="is the placement of a part that is split once more from the inside",
    without="layouts that need it raise",
)

UNFINISHED = NAMES.state(
    "torch.distributed._functional_collectives.AsyncCollectiveTensor",
    why="is a local tensor whose collective has not ended",
    without="such a local tensor raises",
)

ASKING = NAMES.state(
    "torch.distributed.tensor._api",
    why="is the module that imports torch_xla for meshes of isoshard",
    without="`torch.distributed.tensor.distribute_tensor` on such a mesh needs torch_xla",
)

APPLY_STYLE = NAMES.state(
    "torch.distributed.tensor.parallel.ParallelStyle._apply",
    why="is what a parallel style does to a module, by the name that torch calls it",
    without="`parallelize_module` raises for styles that a user wrote after torch's newer ones",
)

DTENSOR_SPEC = NAMES.state(
    "torch.distributed.tensor._dtensor_spec.DTensorSpec",
    why="is a DTensor's layout with its mesh, which scripts of torch_xla read as `tensor._spec`",
    without="`tensor._spec` raises; `placements` and `device_mesh` tell the same",
)

TENSOR_META = NAMES.state(
    "torch.distributed.tensor._dtensor_spec.TensorMeta",
    why="is the shape and dtype in such a layout",
    without="`tensor._spec` raises; `placements` and `device_mesh` tell the same",
)
